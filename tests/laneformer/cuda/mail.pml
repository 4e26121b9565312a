/* The words that blocks exchange (exchange.cuh), for Spin: lanes of two blocks, every order of their loads and stores.

A word is its epoch: {value, epoch} is stored and loaded whole, so a reader that finds the epoch has the value. A step of
a block is one transition: it waits for its inputs, looks at them as late as it may, and stores its result. Whoever
finds a word of a later epoch has been overwritten: the assertions. Whoever waits in vain: Spin's invalid end states.
A block stands for any of its warps: all of them have read their inputs (sync_block) before one of them stores.

test_mail.py defines, from a config and its geometry: LANES (2 or 3), LAYERS, DELAY, MAIL_SLOTS, TOKENS, ATTENDING (the
first blocks of a lane, which hold keys), and as bits of layers NOW, LATER, SENT of both modules. Each lane is on a device
of its own: one block takes the best words, and tells each device the choice and whether the launch ends with it, which
the host may wish at any token. EARLY and ALONE are faults: a block that does not wait for the choice, a wish that the
first device alone is told of. */

#define BLOCKS 2
#define EPOCH (token * LAYERS + layer + 1)
#define BIT(bits, i) (((bits) >> (i)) & 1)
#define OF(bits_0, bits_1) (module == 0 -> BIT(bits_0, layer) : BIT(bits_1, layer))

byte qkv[LANES * BLOCKS], partial[LANES * BLOCKS], activation[LANES * BLOCKS];
byte stream[2 * LANES * BLOCKS];                   /* [module][lane][block] */
byte mail[2 * MAIL_SLOTS * LANES * BLOCKS];        /* [module][slot][lane][block]: read by the same block of other lanes */
byte best[LANES * BLOCKS];                         /* [lane][block]: read by who chooses */
byte choice[LANES];                                /* 2 (token + 1) + whether the launch ends: read by all of a device */
byte gone;                                         /* how many tokens those have seen that have left */

/* two words, or `count` of them, that have come; and that are still there */
#define COME(words, at, count, epoch) (words[at] >= (epoch) && (count == 1 || words[(at) + 1] >= (epoch)))
#define KEPT(words, at, count, epoch) (words[at] == (epoch) && (count == 1 || words[(at) + 1] == (epoch)))
#define STREAM(m) (((m) * LANES + lane) * BLOCKS)
#define MAIL(m, i, l) (((m) * MAIL_SLOTS + (i) % MAIL_SLOTS) * LANES * BLOCKS + (l) * BLOCKS + block)

#define FROM(l, op, i, epoch) (lane == l || mail[MAIL(module, i, l)] op (epoch))
#define ALL_BEST(op) \
  (best[0] op token + 1 && best[1] op token + 1 && best[2] op token + 1 && \
   best[3] op token + 1 && ALL_BEST_3(op))
#if LANES == 3
#define MAILED(op, i, epoch) (FROM(0, op, i, epoch) && FROM(1, op, i, epoch) && FROM(2, op, i, epoch))
#define ALL_BEST_3(op) best[4] op token + 1 && best[5] op token + 1
#else
#define MAILED(op, i, epoch) (FROM(0, op, i, epoch) && FROM(1, op, i, epoch))
#define ALL_BEST_3(op) true
#endif

/* its rows of a module's outputs join the stream (block.cuh: join); they are sent before others are awaited */
inline join(come, kept) {
  atomic {
    come;
    assert(kept);
    if
    :: OF(SENT_0, SENT_1) -> mail[MAIL(module, layer, lane)] = EPOCH
    :: else
    fi
  }
  if
  :: OF(NOW_0, NOW_1) ->
    atomic {
      MAILED(>=, layer, EPOCH);
      assert(MAILED(==, layer, EPOCH));
      stream[STREAM(module) + block] = EPOCH
    }
  :: OF(LATER_0, LATER_1) ->
    atomic {
      MAILED(>=, layer - DELAY, EPOCH - DELAY);
      assert(MAILED(==, layer - DELAY, EPOCH - DELAY));
      stream[STREAM(module) + block] = EPOCH
    }
  :: else -> stream[STREAM(module) + block] = EPOCH
  fi
}

proctype run_block(byte lane, block) {
  byte token, layer, module, to, ends;
  do
  :: token == TOKENS -> break
  :: else ->
    layer = 0;
    do
    :: layer == LAYERS -> break
    :: else ->
      atomic { /* the first layer reads the embedding */
        layer == 0 || COME(stream, STREAM(1), 2, EPOCH - 1);
        assert(layer == 0 || KEPT(stream, STREAM(1), 2, EPOCH - 1));
        qkv[lane * BLOCKS + block] = EPOCH
      }
      if
      :: block < ATTENDING ->
        atomic {
          COME(qkv, lane * BLOCKS, 2, EPOCH);
          assert(KEPT(qkv, lane * BLOCKS, 2, EPOCH));
          partial[lane * BLOCKS + block] = EPOCH
        }
      :: else
      fi;
      module = 0;
      join(COME(partial, lane * BLOCKS, ATTENDING, EPOCH), KEPT(partial, lane * BLOCKS, ATTENDING, EPOCH));
      atomic {
        COME(stream, STREAM(0), 2, EPOCH);
        assert(KEPT(stream, STREAM(0), 2, EPOCH));
        activation[lane * BLOCKS + block] = EPOCH
      }
      module = 1;
      join(COME(activation, lane * BLOCKS, 2, EPOCH), KEPT(activation, lane * BLOCKS, 2, EPOCH));
      layer++
    od;
    atomic { /* the last layer's stream makes the logits */
      COME(stream, STREAM(1), 2, token * LAYERS + LAYERS);
      assert(KEPT(stream, STREAM(1), 2, token * LAYERS + LAYERS));
      best[lane * BLOCKS + block] = token + 1
    }
    if
    :: lane == 0 && block == 0 ->
      atomic {
        ALL_BEST(>=);
        assert(ALL_BEST(==));
        if
        :: ends = 0
        :: ends = 1 /* the host wants in */
        fi;
        to = 0
      }
      do
      :: to == LANES || token + 1 == TOKENS -> break
      :: else -> choice[to] = 2 * (token + 1) + (to <= ALONE -> ends : 0); to++
      od
    :: else
    fi;
    if
    :: token + 1 == TOKENS || (EARLY && block == 1) -> token++
    :: else ->
      atomic {
        choice[lane] >= 2 * (token + 1);
        assert(choice[lane] / 2 == token + 1);
        token++;
        if
        :: choice[lane] % 2 -> break
        :: else
        fi
      }
    fi
  od;
  atomic {
    assert(gone == 0 || gone == token);
    gone = token
  }
}

init {
  byte i;
  atomic {
    do
    :: i == LANES * BLOCKS -> break
    :: else -> run run_block(i / BLOCKS, i % BLOCKS); i++
    od
  }
}

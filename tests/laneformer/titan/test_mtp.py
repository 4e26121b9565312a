"""Tests of training the multi-token-prediction head against the plain model's draft logits and autograd."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from laneformer import Laneformer, LaneformerConfig
from laneformer.titan.attention import document_blocks, document_ids
from laneformer.titan.loss import IGNORE_INDEX
from laneformer.titan.mtp import DraftTraining, step_labels, step_mask
from tests.laneformer.drafts import draft_logits
from tests.laneformer.titan import titan_assets
from tests.laneformer.titan.titan_assets import gradients_of

CONFIG = LaneformerConfig.from_flavor(
    "tiny",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    sliding_window=8,
    swa_layers=(0, 1),
    vocab_size=64,
    num_nextn_predict_layers=1,
)
SEQ_LEN, BOS, WEIGHT = 24, 1, 0.25
# float64 sums in two orders: 1e4 roundings of 2^-53, on gradients of order one
TOLERANCE = 1e4 * 2.0**-53
ROTATED = 2.0**-24  # the same text at other positions: the table of angles is float32


def build(steps=1, config=CONFIG, freeze=False, **arguments):
    training = DraftTraining(steps, WEIGHT, WEIGHT, freeze_base=freeze)
    model = titan_assets.build(config, mtp=training, bos_id=BOS, **arguments).double()
    model.lm_head.chunk_tokens = 16
    return model


@pytest.fixture(scope="module")
def tokens():
    ids = titan_assets.draw_tokens(CONFIG, SEQ_LEN)
    ids[0, 0] = ids[0, 9] = ids[1, 17] = BOS
    return ids


def plain(model) -> Laneformer:
    twin = Laneformer(model.config).double()
    twin.load_state_dict(model.state_dict())
    return twin


def expected_losses(model, tokens, steps) -> tuple[Any, list[Any]]:
    """Return the summed losses of the model and of each step, by a loop over single labels."""
    ids = tokens[:, :-1]
    main = F.cross_entropy(model(ids).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    drafts = []
    for k, logits in enumerate(draft_logits(model, ids, steps), 1):
        total = logits.new_zeros(())
        for row in range(len(ids)):
            for t in range(SEQ_LEN - k):
                between = tokens[row, t + 1 : t + k + 2]
                if BOS not in between.tolist():
                    total = total + F.cross_entropy(logits[row, t], tokens[row, t + k + 1])
        drafts.append(total)
    return main, drafts


@pytest.mark.parametrize(
    ("steps", "switches"),
    [(1, {}), (3, {"deliver_tail": False}), (3, {"lm_head_type": "replicate"})],
)
def test_losses_and_gradients_are_the_plain_models(steps, switches, tokens):
    # drafts' losses only add to gradients; a frozen base gets none and the head the same
    model, frozen = (
        build(steps, dataclasses.replace(CONFIG, **switches), freeze) for freeze in (False, True)
    )
    twin = plain(model)
    losses = model(tokens[:, :-1], tokens[:, 1:])
    losses.sum().backward()
    main, drafts = expected_losses(twin, tokens, steps)
    (main + WEIGHT * sum(drafts)).backward()
    assert abs(losses.sum() - main).item() < TOLERANCE * SEQ_LEN
    for ours, theirs in zip(model.drafted.losses, drafts, strict=True):
        assert abs(ours.sum() - theirs).item() < TOLERANCE * SEQ_LEN
    expected, actual = gradients_of(twin), gradients_of(model)
    assert actual.keys() == expected.keys() == dict(model.named_parameters()).keys()
    assert all((actual[name] - expected[name]).abs().max() < TOLERANCE for name in expected)
    actual = titan_assets.train(frozen, tokens)
    assert actual.keys() - {"losses"} == {name for name in expected if name.startswith("mtp.")}
    assert all(
        (actual[name] - expected[name]).abs().max() < TOLERANCE
        for name in actual
        if name != "losses"
    )


def test_a_document_sees_and_predicts_itself_alone(tokens):
    # restricted attention gives the second document the losses of a window of its own
    model = build(3, mask_documents=True)
    ids, labels = tokens[:1, :-1], tokens[:1, 1:]
    model(ids, labels)
    whole = model.drafted.losses[:, 0, 9:]
    model(ids[:, 9:], labels[:, 9:])
    assert (whole - model.drafted.losses[:, 0]).abs().max() < ROTATED
    model(ids[:, 7:], labels[:, 7:])  # this window begins within the first document
    assert (whole - model.drafted.losses[:, 0, 2:]).abs().max() < ROTATED


def test_untrained_chunks_are_skipped(tokens):
    # drafts ignore the labels that the model ignores; whole chunks are skipped
    model, labels = build(2), tokens[:, 1:].clone()
    labels[:, 5:] = IGNORE_INDEX
    model(tokens[:, :-1], labels)
    expected = model.drafted.losses
    model(tokens[:, :-1], labels, label_count=int((labels != IGNORE_INDEX).sum()))
    assert (expected - model.drafted.losses).abs().max() < TOLERANCE
    assert not expected[:, :, 5:].any()


def test_validation_says_how_often_drafts_are_right(tokens):
    model = build(1).eval()
    twin, ids = plain(model), tokens[:, :-1]
    with torch.no_grad():
        model(ids, tokens[:, 1:])
        chosen, drafts = (
            twin(ids).argmax(-1),
            [logits.argmax(-1) for logits in draft_logits(twin, ids, 3)],
        )
    # the positions that all three drafts have a label for
    length = SEQ_LEN - 3
    right = torch.stack(
        [d[:, :length] == chosen[:, k : length + k] for k, d in enumerate(drafts, 1)]
    )
    expected = torch.stack([right[:k].all(0) for k in (1, 2, 3)])
    assert torch.equal(model.drafted.accepted[:, :, :length], expected)


def test_labels_at_the_border_of_a_window():
    # the label after the window begins a document, so no draft of the one before predicts it
    labels, documents = torch.tensor([[5, 6, BOS]]), torch.zeros(1, 3, dtype=torch.int64)
    assert step_labels(labels, documents, BOS, 1).tolist() == [[6, IGNORE_INDEX, IGNORE_INDEX]]
    assert step_labels(labels, None, None, 1).tolist() == [[6, BOS, IGNORE_INDEX]]


def test_the_weight_falls_once():
    training = DraftTraining(loss_weight=0.3, final_loss_weight=0.1, lower_at_step=67)
    assert [training.weight(step) for step in (1, 67, 68, 100)] == [0.3, 0.3, 0.1, 0.1]


def test_flex_masks_are_the_dense_ones(tokens):
    documents = document_ids(tokens[:, :-1], BOS)
    dense = step_mask(3, torch.arange(SEQ_LEN), None, documents)
    blocks = step_mask(3, torch.arange(SEQ_LEN), document_blocks(documents), documents)
    assert isinstance(dense, torch.Tensor)
    assert isinstance(blocks, BlockMask)
    # every (row, head, query, key)
    places = torch.meshgrid(*(torch.arange(n) for n in (2, 1, SEQ_LEN, 3 * SEQ_LEN)), indexing="ij")
    assert torch.equal(blocks.mask_mod(*places), dense)

"""How each lane's partial outputs join the residual streams, layer by layer."""

from __future__ import annotations

import enum

MODULES = ("attention", "mlp")


class Join(str, enum.Enum):  # noqa: UP042  (StrEnum needs Python 3.11, exported folders also run on 3.10)
    """How lane l's partial output p_l joins its residual stream h_l (P is the sum of p over all lanes).

    Compare with `==`: Transformers may import remote code twice, and then there are two of each member.
    The order is that of the engines' enums (cpu/csrc/model.h; the CUDA kernels' is generated from this one).
    """

    PRESENT = "h_l += P: a blocking all-reduce, every lane sees everything at once"
    NO_REDUCE = "h_l += sqrt(L) * p_l: no exchange between lanes"
    PAST = "h_l += p_l + (P' - p'_l): the other lanes' outputs arrive `broadcast_delay` layers late"

    @property
    def code(self) -> int:
        return list(type(self)).index(self)


class JoinRules:
    """Which layer joins how, from the fields of a LaneformerConfig."""

    num_hidden_layers: int
    broadcast_delay: int
    use_early_comm: bool
    use_attention_comm: bool
    use_mlp_comm: bool
    rebroadcast_early: bool
    first_late_layer: int
    early_layers: int
    flush: bool
    num_nextn_predict_layers: int
    deliver_tail: bool

    def join(self, layer: int, module: str) -> Join:
        """How the outputs of `module` ("attention" or "mlp") in `layer` join the residual stream.

        By default (delay 2), N layers:

            layer       join      its partials reach the other lanes
            0, 1        PRESENT   at once, and not again
            2, 3        PAST      2 layers later; nothing arrives here
            4 .. N-3    PAST      2 layers later; those of 2 layers ago arrive here
            N-2, N-1    PAST      never, except as `delivers` says; those of 2 layers ago arrive here
        """
        assert module in MODULES, f"unknown module {module!r}, expected one of {MODULES}"
        if layer == self.num_hidden_layers:
            return Join.PRESENT  # a draft waits for its lanes
        if not (self.use_attention_comm if module == "attention" else self.use_mlp_comm):
            return Join.NO_REDUCE
        delay = self.broadcast_delay
        early = min(self.early_layers or delay, delay) if self.use_early_comm else 0
        blocking_layers = max(early, self.first_late_layer)
        if not delay or layer < blocking_layers:
            return Join.PRESENT  # PAST with delay 0 is p + (P - p) = P
        return Join.PAST if layer >= delay else Join.NO_REDUCE

    def broadcasts(self, layer: int, module: str) -> bool:
        """Whether the partial outputs of `layer` are added by the other lanes `broadcast_delay` layers later."""
        target = layer + self.broadcast_delay
        if target >= self.num_hidden_layers or self.join(target, module) is not Join.PAST:
            return False
        return self.rebroadcast_early or self.join(layer, module) is not Join.PRESENT

    def adds_delayed(self, layer: int, module: str) -> bool:
        """Whether the other lanes' partial outputs of `broadcast_delay` layers ago join in this layer."""
        return self.join(layer, module) == Join.PAST and self.broadcasts(
            layer - self.broadcast_delay, module
        )

    def delivers(self, layer: int, module: str) -> bool:
        """Whether the other lanes' partials, otherwise lost, join in the end: flushed, or for the MTP head."""
        is_tail = self.num_hidden_layers - self.broadcast_delay <= layer
        is_needed = self.flush or (bool(self.num_nextn_predict_layers) and self.deliver_tail)
        return is_needed and is_tail and self.join(layer, module) == Join.PAST

    @property
    def equal_delivered_streams(self) -> bool:
        """Whether all lanes' streams are the same once `delivers` is done, up to rounding."""

        def once(layer: int, module: str) -> bool:  # every lane has every partial, and has it once
            join = self.join(layer, module)
            joins_later = self.delivers(layer, module) or self.broadcasts(layer, module)
            return joins_later if join == Join.PAST else join == Join.PRESENT and not joins_later

        return all(once(i, module) for i in range(self.num_hidden_layers) for module in MODULES)

    def equal_streams(self, layers: int) -> bool:
        """Whether all lanes' streams are the same after the first `layers`, so that one is kept for all."""
        return all(
            self.join(i, module) == Join.PRESENT for i in range(layers) for module in MODULES
        )

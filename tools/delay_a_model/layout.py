"""Which KV groups (with their query heads) and which neurons share a lane: a permutation that the dense model's
function does not see, and that a delay does.

A module reads its lane's stream, from which the other lanes' partials of the 2 `delay` modules before it are missing.
`damage` estimates what that costs to first order, in nats a token:

    1/2 sum over modules r and lanes l of E[m^T G m],  G = E[g g^T] summed over the units of r in l

m is what is missing in units of the dense stream's RMS, and g the gradient of the loss at what a unit reads, the
labels drawn from the model itself (so that E[g g^T] is its Fisher information). One forward and one backward pass
give all of it. Three rules minimise it by swaps:

    activations  the missing partials as they are: units of one lane may cancel each other
    objective    without products of different units: each pair of a writer and a reader counts for itself
    affinity     the same, a module's only writer being the module before it; in the manner of
                 "Affinity-Aware Sharding for DTP" (arXiv 2609.13846), whose pairs have other weights

    T tokens   U units of a module   W values of a unit   R rows of a unit   D hidden   L lanes
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laneformer import Laneformer, LaneformerConfig
from laneformer.model import run_layers
from laneformer.positions import rope_table

RULES = ("identity", "random", "affinity", "objective", "activations")
Layout = list[list[int]]  # of attention and MLP of every layer in turn: the units, lane after lane
MAX_SWEEPS, LEAST_GAIN = 8, 5e-3  # of the search: it ends where a sweep gains a smaller share


@dataclass
class Module:
    """What the units of one module write and read."""

    values: Tensor  # (T, U, W)
    out: Tensor  # (U, W, D): a unit writes values @ out
    reads: Tensor  # (U, R, D): a unit's E[g g^T] is reads^T reads, over the norm's input / RMS
    scale: Tensor  # (T,): 1 / RMS of what the norm reads

    def written(self, lanes: Tensor, count: int) -> Tensor:
        """Partials (L, T, D) of units that stand in these lanes (U,)."""
        of_lane = [lanes == lane for lane in range(count)]
        return torch.stack([self.values[:, of].flatten(1) @ self.out[of].flatten(0, 1) for of in of_lane])

    def read(self, lanes: Tensor, count: int) -> Tensor:
        """G of every lane, (L, D, D)."""
        rows = [self.reads[lanes == lane].flatten(0, 1) for lane in range(count)]
        return torch.stack([own.T @ own for own in rows])


def capture(dense: Laneformer, windows: Sequence[Tensor], every: int = 1, seed: int = 0) -> list[Module]:
    """Attention and MLP of every layer of a model of one lane, on batches of token ids (b, S).

    every: T of the values counts each so many tokens once; gradients are those of all.
    """
    taken: list[dict[str, list[Tensor]]] = [{"values": [], "scale": []} for _ in range(2 * len(dense.layers))]
    moments: list[Any] = [None] * len(taken)
    generator = torch.Generator().manual_seed(seed)
    for ids in windows:
        projected: list[list[Tensor]] = [[] for _ in taken]
        hooks = [hook for at, module in enumerate(modules_of(dense)) for hook in
                 watch(*module, taken[at], projected[at])]  # fmt: skip
        embedding = dense.tok_embeddings(ids).requires_grad_()
        logits = through(dense, embedding)
        drawn = torch.multinomial(logits.detach().softmax(-1).flatten(0, 1), 1, generator=generator)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), drawn[:, 0], reduction="sum")
        gradients = iter(torch.autograd.grad(loss, [x for each in projected for x in each]))
        for hook in hooks:
            hook.remove()
        for at, each in enumerate(projected):
            units = units_of(dense.config, at)
            own = torch.cat([next(gradients).reshape(ids.numel(), units, -1) for _ in each], -1)
            moment = torch.einsum("tua,tub->uab", own, own)
            moments[at] = moment if moments[at] is None else moments[at] + moment
    found = []
    tokens = sum(ids.numel() for ids in windows)
    for at, (norm, rows, out) in enumerate(modules_of(dense)):
        units = units_of(dense.config, at)
        moment = moments[at]
        assert moment is not None, "no calibration text"
        # moment = root^T root; eigenvalues are not negative but for rounding
        size, vectors = torch.linalg.eigh(moment.double() / tokens)
        root = (size.clamp(min=0).sqrt()[:, :, None] * vectors.mT).float()
        weight = torch.cat([row.weight.detach().reshape(units, -1, norm.weight.shape[-1]) for row in rows], 1)
        found.append(
            Module(
                torch.cat(taken[at]["values"])[::every].unflatten(1, (units, -1)),
                out.weight.detach()[0].T.unflatten(0, (units, -1)).contiguous(),
                root @ (weight * norm.weight.detach().flatten()),
                torch.cat(taken[at]["scale"])[::every],
            )
        )
    return found


def modules_of(model: Laneformer) -> list[tuple[Any, list[Any], Any]]:
    """(norm, the matrices that read it, the matrix that writes) of attention and MLP of every layer."""
    found = []
    layers: Any = model.layers
    for layer in layers:
        attention, mlp = layer.attention, layer.feed_forward
        found.append((layer.attention_norm, [attention.wq, attention.wk, attention.wv], attention.wo))
        found.append((layer.ffn_norm, [mlp.w1, mlp.w3], mlp.w2))
    return found


def units_of(config: LaneformerConfig, module: int) -> int:
    return config.intermediate_size if module % 2 else config.num_key_value_heads


def watch(
    norm: Any, rows: list[Any], out: Any, taken: dict[str, list[Tensor]], projected: list[Tensor]
) -> list[Any]:
    """Hooks that keep what `out` reads, the RMS of what `norm` reads, and the results of `rows`."""

    def scale(module: Any, given: tuple[Tensor, ...]) -> None:
        taken["scale"].append((given[0].detach().square().mean(-1) + norm.eps).rsqrt().flatten())

    def values(module: Any, given: tuple[Tensor, ...]) -> None:
        taken["values"].append(given[0].detach().flatten(0, 2))

    def result(module: Any, given: Any, made: Tensor) -> None:
        projected.append(made)

    hooks = [norm.register_forward_pre_hook(scale), out.register_forward_pre_hook(values)]
    return hooks + [row.register_forward_hook(result) for row in rows]


def through(dense: Laneformer, embedding: Tensor) -> Tensor:
    """Logits (B, S, V) of embeddings (B, S, D)."""
    positions = torch.arange(embedding.shape[1])
    rope, masks = rope_table(dense.config, positions), dense.masks(positions, positions)
    h, _ = run_layers(dense.layers, dense.config, embedding, rope, masks)
    logits: Tensor = dense.lm_head(h, dense.norm)
    return logits


class Search:
    """Swaps that lower `damage` for layers from `first` on late by `delay`; the other layers stay as they lie."""

    def __init__(
        self, modules: Sequence[Module], lanes: int, delay: int, first: int, rule: str = "activations"
    ):
        self.modules, self.count, self.first = modules, lanes, 2 * first
        self.reach = 1 if rule == "affinity" else 2 * delay
        self.together = rule == "activations"
        self.lanes = [torch.arange(len(m.out)) * lanes // len(m.out) for m in modules]
        placed = list(zip(modules, self.lanes, strict=True))
        self.partials = [m.written(at, lanes) for m, at in placed]
        self.sensitivity = [m.read(at, lanes) for m, at in placed]  # G, (L, D, D)

    def writers(self, reader: int) -> range:
        return range(max(self.first, reader - self.reach), reader)

    def readers(self, writer: int) -> range:
        return range(writer, min(len(self.modules), writer + self.reach + 1))

    def missing(self, reader: int) -> Tensor:
        """(L, T, D), in units of the RMS."""
        parts = [self.partials[w].sum(0) - self.partials[w] for w in self.writers(reader)]
        return torch.stack(parts).sum(0) * self.modules[reader].scale[:, None]

    def covariance(self, reader: int) -> Tensor:
        """E[m m^T] of every lane, (L, D, D); of single units, summed, where units do not count together."""
        scale = self.modules[reader].scale
        if self.together:
            missing = self.missing(reader)
            return missing.mT @ missing / len(scale)
        found = []
        for lane in range(self.count):
            total = torch.zeros(())
            for w in self.writers(reader):
                m, away = self.modules[w], self.lanes[w] != lane
                values, out = m.values[:, away] * scale[:, None, None], m.out[away]
                if out.shape[1] == 1:
                    weight = values[:, :, 0].square().mean(0)
                    total = total + out[:, 0].T @ (weight[:, None] * out[:, 0])
                else:
                    within = torch.einsum("tua,tub->uab", values, values) / len(scale)
                    total = total + torch.einsum("uad,uab,ube->de", out, within, out)
            found.append(total)
        return torch.stack(found)

    def damage(self, readers: Sequence[int] | range) -> float:
        """Nats a token, of what these modules do not read."""
        late = [r for r in readers if self.writers(r)]
        return sum(float((self.sensitivity[r] * self.covariance(r)).sum()) for r in late) / 2

    def total(self) -> float:
        return self.damage(range(len(self.modules)))

    def place(self, module: int, lanes: Tensor) -> None:
        self.lanes[module] = lanes
        self.partials[module] = self.modules[module].written(lanes, self.count)
        self.sensitivity[module] = self.modules[module].read(lanes, self.count)

    def costs(self, module: int) -> Tensor:
        """(U, L): half of a unit's damage if it stood in that lane, the others where they are, up to a constant."""
        own, lanes = self.modules[module], self.lanes[module]
        found = torch.zeros(len(lanes), self.count)
        if self.writers(module):
            for lane, seen in enumerate(self.covariance(module)):
                found[:, lane] += torch.einsum("urd,urd->u", own.reads @ seen, own.reads)
        if own.out.shape[1] > 1:
            return found
        out, values = own.out[:, 0], own.values[:, :, 0]
        for reader in self.readers(module)[1:]:
            scale = self.modules[reader].scale
            weight = (values * scale[:, None]).square().mean(0)
            missing = self.missing(reader) if self.together else None
            for lane, g in enumerate(self.sensitivity[reader]):
                alone = weight * ((out @ g) * out).sum(1)
                if missing is None:
                    found[:, lane] -= alone
                    continue
                felt = values.T @ (missing[lane] @ g * scale[:, None]) / len(scale)
                # of what a lane misses, a unit that stands there is no part yet: it would come to it
                here = torch.where(lanes == lane, 1.0, -1.0)
                found[:, lane] -= 2 * (felt * out).sum(1) + here * alone
        return found

    def improve(self, module: int, generator: random.Random) -> None:
        """Swap units of every two lanes, best first: as many as lower the damage."""
        late = list(self.readers(module))
        best = self.damage(late)
        pairs = [(a, b) for a in range(self.count) for b in range(a)]
        generator.shuffle(pairs)
        if self.modules[module].out.shape[1] > 1:
            return self.exchange_groups(module, late, best)
        costs = self.costs(module)  # a little old for the second pair; the damage itself decides
        for a, b in pairs:
            lanes = self.lanes[module]
            ours, theirs = (torch.nonzero(lanes == lane)[:, 0] for lane in (a, b))
            gains = (costs[ours, a] - costs[ours, b]), (costs[theirs, b] - costs[theirs, a])
            ours, theirs = (
                x[g.argsort(descending=True, stable=True)] for x, g in zip((ours, theirs), gains, strict=True)
            )
            both = gains[0].sort(descending=True).values + gains[1].sort(descending=True).values
            swaps = int((both > 0).sum())
            while swaps:
                changed = lanes.clone()
                changed[ours[:swaps]], changed[theirs[:swaps]] = b, a
                self.place(module, changed)
                if (now := self.damage(late)) < best:
                    best = now
                    break
                self.place(module, lanes)
                swaps //= 2
        return None

    def exchange_groups(self, module: int, late: list[int], best: float) -> None:
        """The best exchange of two units after the other, until none helps; there are few."""
        while True:
            lanes, found = self.lanes[module], None
            for u in range(len(lanes)):
                for v in range(u):
                    if lanes[u] == lanes[v]:
                        continue
                    changed = lanes.clone()
                    changed[u], changed[v] = lanes[v], lanes[u]
                    self.place(module, changed)
                    now = self.damage(late)
                    if now < best * (1 - 1e-6):
                        best, found = now, changed
            self.place(module, lanes if found is None else found)
            if found is None:
                return

    def run(self, seed: int = 0) -> list[float]:
        """Sweeps over the modules; the damage before, and after each."""
        generator, found = random.Random(seed), [self.total()]
        while len(found) <= MAX_SWEEPS:
            order = list(range(self.first, len(self.modules)))
            generator.shuffle(order)
            for module in order:
                self.improve(module, generator)
            found.append(self.total())
            if found[-1] > (1 - LEAST_GAIN) * found[-2]:
                break
        return found

    def layout(self) -> Layout:
        return [lanes.argsort(stable=True).tolist() for lanes in self.lanes]


def random_layout(config: LaneformerConfig, first: int, seed: int) -> Layout:
    """Any units anywhere in layers from `first` on."""
    generator, layout = random.Random(seed), identity(config)
    for order in layout[2 * first :]:
        generator.shuffle(order)
    return layout


def identity(config: LaneformerConfig) -> Layout:
    return [list(range(units_of(config, at))) for at in range(2 * config.num_hidden_layers)]


def laid_out(weights: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The weights of a cut model with its units in this order: the same function at delay 0."""
    found = dict(weights)
    for name, weight in weights.items():
        part = name.split(".")
        if part[0] != "layers" or "norm" in name:
            continue
        order = torch.tensor(layout[2 * int(part[1]) + (part[2] == "feed_forward")], device=weight.device)
        if part[3] in ("wo", "w2") and weight.dim() == 3:  # (L, D, in / L)
            columns = weight.movedim(2, 1).flatten(0, 1).unflatten(0, (len(order), -1))
            found[name] = columns[order].reshape(weight.movedim(2, 1).shape).movedim(1, 2).contiguous()
        elif weight.dim() > 1:
            rows = weight.flatten(0, 1).unflatten(0, (len(order), -1))
            found[name] = rows[order].reshape(weight.shape)
    return found

"""Tests that a mixture as dataset or node gives the trainer's sequences, on any ranks, resumed."""

from itertools import islice

import numpy as np
import pytest

from data_mixtures.mixture import Mixture, pin


@pytest.fixture(scope="module")
def export():
    pytest.importorskip("torchdata")
    pytest.importorskip("datasets")
    from data_mixtures import export

    return export


def starts(rows) -> list[int]:
    return [int(row["input_ids"][0]) for row in rows]


def expect_tokens(lock, first: int, count: int) -> list[int]:
    return Mixture.open(lock).sequences(first, count)[0][:, 0].tolist()


@pytest.mark.parametrize("world", [1, 3])
def test_a_dataset_has_the_sequences_in_their_order(export, counting_data, world):
    lock = counting_data() / "phase1.lock.json"
    ranks = [
        list(export.as_dataset(lock, 42, start=6, rank=rank, world=world)) for rank in range(world)
    ]
    # one row of each rank in turn is the order of the trainer
    assert [row for turn in zip(*map(starts, ranks), strict=True) for row in turn] == expect_tokens(
        lock, 6, 36
    )
    tokens, sources = Mixture.open(lock).sequences(6, 1)
    assert np.array_equal(ranks[0][0]["input_ids"], tokens[0])
    assert ranks[0][0]["source"] == f"s{sources[0]}"
    dataset = export.as_dataset(lock, 42, rank=1)
    assert starts(islice(dataset, 5)) == starts(islice(dataset, 5)), (
        "each iteration begins at `start`"
    )
    with pytest.raises(ValueError, match="its epoch_cap is 3"):
        export.as_dataset(lock, 10**6)


def test_a_node_resumes_anywhere_with_any_number_of_ranks(export, counting_data):
    from torchdata.nodes import Batcher, Loader

    data = counting_data()
    lock = data / "phase1.lock.json"
    nodes = [export.MixtureNode(lock, rank, 4) for rank in range(4)]
    for node in nodes:
        node.reset()
    read = starts(node.next() for _ in range(5) for node in nodes)
    # a state counts global sequences, so every rank saves the same one
    states = [node.state_dict() for node in nodes]
    assert all(state == states[0] for state in states)
    # one rank takes over from four, without a gap
    node = export.MixtureNode(lock)
    node.reset(states[0])
    assert read + starts(islice(node, 12)) == expect_tokens(lock, 0, 32)
    pin(data, "other", {"s0": 1, "s1": 3, "s2": 1}, 5, 4, 3)
    with pytest.raises(ValueError, match=r"the state is of another mixture than .*other.lock.json"):
        export.MixtureNode(data / "other.lock.json").reset(states[0])

    # torchdata's own loader saves the state of its nodes
    loader, resumed = (
        Loader(Batcher(export.MixtureNode(lock), 4)) for _ in range(2)
    )  # torchdata's own
    assert starts(list(islice(loader, 3))[2]) == expect_tokens(lock, 8, 4)
    resumed.load_state_dict(loader.state_dict())
    assert starts(next(iter(resumed))) == expect_tokens(lock, 12, 4)

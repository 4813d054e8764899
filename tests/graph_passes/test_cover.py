"""The exact cover against all subsets of the candidates; the part that it settles without prices; ties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from graph_passes.cover import NoCoverError, Option, cover, open_and_sure

GIVEN = ("x",)


def random_options(rng: np.random.Generator) -> tuple[list[Option], list[str], list[str]]:
    """Candidates over a few tensors, each of which needs earlier ones; wanted tensors, and tensors that may be produced
    once at most."""
    tensors = [*GIVEN, *"abcdefg"]
    options = []
    for _ in range(int(rng.integers(5, 12))):
        place = int(rng.integers(1, len(tensors)))
        needs = rng.choice(tensors[:place], size=rng.integers(0, min(place, 3) + 1), replace=False)
        makes = rng.choice(tensors[place:], size=rng.integers(1, min(len(tensors) - place, 3) + 1), replace=False)
        cost = math.inf if rng.random() < 0.1 else float(rng.integers(0, 6))
        options.append(Option(frozenset(map(str, needs)), frozenset(map(str, makes)), cost))
    return options, [str(t) for t in rng.choice(tensors[1:], size=2, replace=False)], ["g"] * int(rng.integers(2))


def is_cover(options: list[Option], taken: tuple[int, ...], wanted: list[str], once: list[str]) -> bool:
    made = {tensor for number in taken for tensor in options[number].makes} | {*GIVEN}
    makers = [tensor for number in taken for tensor in options[number].makes]
    return ({*wanted} <= made and all(options[number].needs <= made for number in taken)
            and all(makers.count(tensor) <= 1 for tensor in once))


def least(options: list[Option], wanted: list[str], once: list[str]) -> float:
    """The least cost over all subsets."""
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(options)), size) for size in range(len(options) + 1))
    return min((sum(options[number].cost for number in taken) for taken in subsets
                if is_cover(options, taken, wanted, once)), default=math.inf)


def test_no_subset_is_cheaper(rng: np.random.Generator) -> None:
    possible = 0
    for _ in range(150):
        options, wanted, once = random_options(rng)
        best = least(options, wanted, once)
        if best == math.inf:
            continue  # NoCoverError is right here, unless one tensor would have to be produced twice
        taken = cover(options, GIVEN, wanted, once)
        assert is_cover(options, tuple(taken), wanted, once)
        assert sum(options[number].cost for number in taken) == best
        possible += 1
    assert possible > 20


def test_what_every_cover_takes_is_taken_whatever_it_costs(rng: np.random.Generator) -> None:
    """Candidates that every cover takes are sure at any price; candidates that no cover can use are neither open nor
    sure."""
    for _ in range(60):
        options, wanted, _ = random_options(rng)
        priced = [option._replace(cost=1.0) for option in options]
        try:
            undecided, sure = open_and_sure(priced, GIVEN, wanted)
        except NoCoverError:
            with pytest.raises(NoCoverError):
                cover(priced, GIVEN, wanted)
            continue
        assert not undecided & sure
        for _ in range(3):
            costs = [option._replace(cost=float(rng.random())) for option in options]
            taken = {*cover(costs, GIVEN, wanted)}
            assert sure <= taken <= sure | undecided


def test_a_tensor_that_may_be_made_once() -> None:
    """Both producers of the tensor a are cheaper together than the one producer of all three tensors, but must not both
    run.
    """
    options = [Option(frozenset(), frozenset("ab"), 1.0), Option(frozenset(), frozenset("ac"), 1.0),
               Option(frozenset(), frozenset("abc"), 3.0)]
    assert cover(options, (), "abc") == [0, 1]
    assert cover(options, (), "abc", once="a") == [2]


def test_of_equal_candidates_the_first_is_taken() -> None:
    options = [Option(frozenset("x"), frozenset("a"), 1.0)] * 3
    assert cover(options, "x", "a") == [0]
    assert cover([option._replace(cost=2.0 - number) for number, option in enumerate(options)], "x", "a") == [2]


def test_a_long_chain_is_cheap() -> None:
    """A thousand stages, each in one candidate, in two, or with the next one in one: exact, and fast."""
    options = []
    for stage in range(1000):
        here, half, there = f"t{stage}", f"h{stage}", f"t{stage + 1}"
        options += [Option(frozenset([needed]), frozenset(made), cost) for needed, made, cost in (
            (here, [there], 3.0), (here, [half], 1.0), (half, [there], 1.5), (here, [there, f"t{stage + 2}"], 4.0))]
    taken = cover(options, ["t0"], ["t1000"])
    assert sum(options[number].cost for number in taken) == 2000.0

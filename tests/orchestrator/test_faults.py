"""One rollout's trouble is its own: every method of every interface, made to fail for one rollout in 32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from afield import errors
from bench.collect.faults import FAULTS, random_faults
from support.fault_cases import METHODS, Case, problems, sample
from support.faults import ERRORS, WRAPPERS, methods_of


def test_every_interface_method_has_a_wrapper_and_a_fault_declaration() -> None:
    declared = {f"{interface.__name__}.{name}" for interface in WRAPPERS for name in methods_of(interface)}
    assert declared == set(METHODS)
    for interface, wrapper in WRAPPERS.items():
        missing = [name for name in methods_of(interface) if name not in vars(wrapper)]
        assert not missing, f"{wrapper.__name__} does not forward {missing}"


def test_every_error_class_is_among_the_faults() -> None:
    def below(parent: type) -> Iterator[type]:
        for child in parent.__subclasses__():
            if child.__module__ == errors.__name__:
                yield child
                yield from below(child)

    # Outage is how the product says that a part answers nobody; a policy's failure is no part's to raise.
    ours = {kind.__name__ for kind in below(errors.AfieldError)} - {
        "Outage",
        "PolicyFailure",
        "RolloutFailure",
    }
    assert ours <= set(ERRORS)


@pytest.mark.parametrize("case", sample(), ids=str)
def test_with_one_faulty_rollout_in_32_the_others_train_and_the_one_is_explained(case: Case) -> None:
    assert problems(case) == []


def test_after_nine_random_faults_what_was_trained_is_the_data_set() -> None:
    """Kills and resumptions among them: every rollout once, with a verifier, for every seed."""
    told = random_faults(10)
    assert told["met"] > 10 * FAULTS / 2 and told["resumed"] > 10
    assert (told["missing"], told["doubled"], told["explained"]) == ([], [], [])

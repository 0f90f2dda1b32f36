"""Doctor: a target's figures, without measuring where they are stated."""

from typing import Any


def test_doctor_of_a_target_that_states_its_figures(quantkit: Any) -> None:
    ran = quantkit("doctor", "--target", "l4")
    assert ran.code == 0
    assert "this machine" in ran.out
    assert quantkit("doctor", "--target", "l4", "--json").envelope["result"]["target"] == "l4"

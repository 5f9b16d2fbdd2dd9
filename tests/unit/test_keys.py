"""Key names, and that nothing can be smuggled into them."""

from __future__ import annotations

from typing import Any

import pytest

from producer.errors import InvalidRequest
from producer.keys import Keys, check_name, check_tier


def test_every_key_of_a_queue_has_its_hash_tag() -> None:
    keys = Keys("default")
    assert keys.stream("realtime") == "headrace:{default}:realtime"
    assert keys.stream("batch") == "headrace:{default}:batch"
    assert keys.reply("x1") == "headrace:{default}:reply:x1"
    assert keys.state("x1") == "headrace:{default}:state:x1"
    assert keys.worker("w") == "headrace:{default}:worker:w"
    names = ("workers", "dead", "control", "admin", "limits")
    assert (keys.workers, keys.dead, keys.control, keys.admin, keys.limits) == tuple(f"headrace:{{default}}:{name}" for name in names)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a{b", "a}b", "a\n", "a\0", "é", "*", "a" * 129, 5, None, b"a"])
def test_names_that_could_reach_another_key_are_refused(name: Any) -> None:
    with pytest.raises(InvalidRequest):
        check_name("id", name)
    with pytest.raises(InvalidRequest):
        Keys(name)


def test_names_of_the_allowed_characters_pass() -> None:
    for name in ("a", "A-Z.0_9", "a" * 128):
        assert check_name("id", name) == name


@pytest.mark.parametrize("tier", ["", "REALTIME", "dead", None, 1, ["batch"]])
def test_unknown_tier_is_refused(tier: Any) -> None:
    with pytest.raises(InvalidRequest):
        check_tier(tier)

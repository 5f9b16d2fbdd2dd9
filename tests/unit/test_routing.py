import pytest

from producer.wire import GenerateRequest
from worker.routing import Route, tier_of


def wanted(**labels: str) -> GenerateRequest:
    return GenerateRequest(id="x", prompt="p", **labels)


def test_the_first_route_that_matches_wins() -> None:
    routes = (Route.parse("batch:source=nightly-*,task=eval"), Route.parse("realtime:source=nightly-*"))
    assert tier_of(wanted(source="nightly-7", task="eval"), routes) == "batch"
    assert tier_of(wanted(source="nightly-7"), routes) == "realtime"


def test_without_a_match_the_streams_tier_stays() -> None:
    assert tier_of(GenerateRequest(id="x", prompt="p", tier="batch"), (Route.parse("realtime:user=vip"),)) == "batch"


@pytest.mark.parametrize("text", ["batch", "batch:", "fast:source=a", "batch:colour=red", "batch:source=", "batch:source=a,"])
def test_a_malformed_route_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"route is|tier must"):
        Route.parse(text)

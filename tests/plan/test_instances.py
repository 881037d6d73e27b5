"""Several instances of an engine on a node: what a plan says they take together."""

import pytest

from tests.plan.test_serving_rules import messages, planned
from trtforge.plan.instances import instances_of


def test_instances_on_gpus_of_their_own_take_what_one_takes_on_each() -> None:
    one, two = planned({}, tp=2), planned({"gpu_device_ids": "0,1;2,3"}, tp=2)
    assert instances_of(one) is None
    found = instances_of(two)
    assert found is not None
    assert one.memory is not None
    assert two.memory == one.memory
    assert (found.count, found.gpus, found.shared) == (2, 4, 1)
    assert found.per_gpu == one.memory.fullest.total
    assert found.total == 2 * one.memory.over_all("total")
    assert found.max_concurrency == 2 * (one.full_length_requests or 0) > 0
    assert two.legal


def test_instances_that_share_a_gpu_take_the_sum() -> None:
    """Stages of unlike size: GPU 0 holds the first stage of one instance and the last of the other."""
    settings = {"gpu_device_ids": "0,1;1,0", "kv_cache_tokens": 40960}
    found = instances_of(planned(settings, pp=2))
    alone = planned({"kv_cache_tokens": 40960}, pp=2)
    assert found is not None
    assert alone.memory is not None
    first, last = (stage.total for stage in alone.memory.stages)
    assert first != last
    assert (found.count, found.gpus, found.shared, found.per_gpu) == (2, 2, 2, first + last)
    assert found.total == 2 * (first + last)


@pytest.mark.parametrize(
    ("settings", "gpu", "refusal"),
    [
        ({"gpu_device_ids": "0;0", "kv_cache_tokens": 32768}, "h100-80gb", None),
        ({"gpu_device_ids": "0;0"}, "h100-80gb", "instances share a GPU, and each would take kv_cache_fraction"),
        ({"gpu_device_ids": "0;0;0;0;0", "kv_cache_tokens": 32768}, "h100-80gb", "5 ranks of 5 instances share a GPU"),
        ({"gpu_device_ids": "0;1;2;3;4", "kv_cache_tokens": 32768}, "h100-80gb", None),
        ({"gpu_device_ids": "0;0", "kv_cache_tokens": 32768}, "l40s", None),
    ],
)
def test_a_gpu_must_hold_the_instances_that_share_it(
    settings: dict[str, object], gpu: str, refusal: str | None
) -> None:
    found = planned(settings, gpu=gpu)
    assert len(messages(found)) >= (refusal is not None)
    if refusal is None:
        assert messages(found) == []
    else:
        assert any(refusal in message for message in messages(found))

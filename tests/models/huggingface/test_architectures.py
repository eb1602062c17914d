"""Architectures as they come train in stages as on one device, or say why not."""

import pytest

from tests.models.huggingface.architectures import judge
from tests.processes import ProcessPool

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("causal", "jamba"),  # Layers of two classes.
        ("causal", "deepseek_v3"),
        ("seq2seq", "fsmt"),  # Its step changes the batch in place.
        ("seq2seq", "longt5"),  # Its layers hand on a bias that is larger than what they compute.
        ("token", "markuplm"),  # Its tables of tags are larger than its layers.
        ("image", "vit"),
    ],
)
def test_it_trains_as_on_one_device(pool: ProcessPool, head: str, name: str) -> None:
    verdict, why = judge(pool, name, head)
    assert verdict == "equal", why


def test_one_whose_layers_are_one_is_refused(pool: ProcessPool) -> None:
    verdict, why = judge(pool, "albert", "masked")
    assert verdict == "refused"
    assert "can't fill 2 stages" in why

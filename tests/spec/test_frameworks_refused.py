"""Frameworks that were tried and do not train here are named with the reason."""

import pytest
from pydantic import ValidationError

from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import REFUSED


def asked_for(name):
    values = {"name": "a", "model": {"id": "a/b"}, "launch": {"framework": name, "python": "env/bin/python"}}
    return Experiment.model_validate(values)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("verl", "'verl' is not driven: verl's SFT trainer .* NCCL and .* CUDA device"),
        ("nemo-automodel", "NeMo AutoModel .* CUDA device alone"),
        ("NeMo", "NeMo AutoModel"),
        ("megatron-bridge", "import its logs with `ftbench import`"),
        ("torchtune", "development of torchtune has stopped"),
    ],
)
def test_a_framework_that_was_tried_is_refused_with_the_reason_and_another(name, told):
    with pytest.raises(ValidationError, match=f"{told}.*: use trl, axolotl"):
        asked_for(name)


def test_others_are_refused_by_the_list_and_those_that_train_are_taken():
    with pytest.raises(ValidationError, match=r"trl.*axolotl"):
        asked_for("unheard")
    assert asked_for("axolotl").launch.framework not in REFUSED

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_builders import CONFIGS, random_model, save
from transformers import PreTrainedModel

from counterpoint.spec.source import ModelSource


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread does not help tiny passes, and delays them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=CONFIGS)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, ModelSource]:
    """Each kind of model in transformers, and saved to a folder."""
    model = random_model(CONFIGS[request.param])
    return model, save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for compiled kernels, so that a test compiles the source as it is."""
    return tmp_path_factory.mktemp("kernels")

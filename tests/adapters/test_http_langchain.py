"""LangChain's own integration tests for chat models, through ChatOpenAI, against a gateway with SmolLM2.

What a model of 135 million parameters cannot do is marked by name, with the reason.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.adapters.processes import environment

MODEL = "smollm2-135m"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """`pagemill serve` as a process of its own; the base URL that it prints for clients of OpenAI."""
    command = [sys.executable, "-m", "pagemill", "serve", "--http-port=0", "--threads=1"]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--dtype=float32", "--quantization=gguf", "--max-model-len=2048", "--num-blocks-override=256"],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(),
            cwd=folder,
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if b"http://" in line:
                yield line.decode().split()[-1]
                break
        else:
            pytest.fail((folder / "serve.log").read_text())
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="class")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with served(tmp_path_factory.mktemp("serve")) as address:
        request.cls.url = address
        yield


@pytest.mark.asyncio(loop_scope="class")  # clients are kept, and belong to their loop
@pytest.mark.usefixtures("url")
class TestChatOpenAI(ChatModelIntegrationTests):
    url: str

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        asked = {"model": MODEL, "base_url": self.url, "api_key": "none", "max_retries": 0, "stream_usage": True}
        return {**asked, "max_tokens": 40, "temperature": 0}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"timeout": 100, "stop": []}

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> BaseChatModel:
        """Greedily this model ends no long string, so free text in a form is drawn, always in the same way."""
        more = getattr(request, "param", None) or {}
        if "structured_output" in request.node.name:
            more = {"temperature": 1.0, "top_p": 0.9, "seed": 1, "max_tokens": 100, **more}
        elif "tool" in request.node.name:
            more = {"max_tokens": 120, **more}
        return self.chat_model_class(**{**self.standard_chat_model_params, **self.chat_model_params, **more})

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False

    @pytest.mark.xfail(reason="which keys a JSON object should have is only asked for in words, and this model forgets")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="this model was not taught to call tools and answers in plain text where it may")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

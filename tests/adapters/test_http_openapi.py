"""The OpenAPI document names what is taken and holds when schemathesis tries it; the page; browsers elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest

from pagemill.adapters.http import openapi_schemas as schemas
from pagemill.adapters.http.openai_fields import PASSED, read_chat, read_completion
from pagemill.adapters.http.playground import PATH
from pagemill.adapters.http.responses_body import PASSED as RESPONSE_PASSED
from pagemill.adapters.http.responses_body import read_response
from pagemill.engine.vllm_arguments import SAMPLING_ARGUMENTS
from tests.adapters.http_gateway import HI, Web

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/requests")
EXAMPLES = "2"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Sent by scripts for vLLM, at the one value that changes nothing; not worth a line in the document.
UNNAMED = set(SAMPLING_ARGUMENTS) | {"logprobs"}


def test_the_document_names_what_is_taken() -> None:
    assert set(schemas.COMMON) >= PASSED - UNNAMED
    assert set(schemas.COMMON) <= PASSED
    assert RESPONSE_PASSED - {"structured_outputs", "chat_template_kwargs"} <= set(schemas.RESPONSE["properties"])
    for schema, read, body in (
        (schemas.COMPLETION, read_completion, {"prompt": "x"}),
        (schemas.CHAT_COMPLETION, read_chat, {"messages": HI}),
        (schemas.RESPONSE, read_response, {"input": "x"}),
    ):
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(body, schema)
        for name in set(schema["properties"]) - {"idempotency_key"} - set(body):
            read({**body, name: None})  # type: ignore[operator]


def test_schemathesis_finds_nothing(tried: Any, tmp_path: Path) -> None:
    """Every operation with a few bodies that fit the document and a few that do not: answers as documented, no 5xx."""

    async def scenario(web: Web) -> None:
        document = (await web.get("/openapi.json")).json
        for path in GENERATING:  # what is accepted is generated, and has to end soon
            body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body["properties"][name] = {"type": "integer", "minimum": 1, "maximum": 2}
            body["required"].append(name)
        file = tmp_path / "openapi.json"
        file.write_bytes(orjson.dumps(document))
        options = ("--url", web.url, "--max-examples", EXAMPLES, "--phases", "examples,fuzzing", "--seed", "7")
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            str(file),
            *options,
            "--checks",
            CHECKS,
            "--no-shrink",
        ]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path
        )
        printed, _ = await asyncio.wait_for(process.communicate(), 100)
        assert process.returncode == 0, printed.decode()

    tried(scenario)


def test_the_page(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        page = await web.get(PATH)
        assert page.headers["Content-Type"].startswith("text/html") and "/playground.js" in page.text
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
        assert (await web.get("/playground.js")).headers["Content-Type"].startswith("text/javascript")
        assert (await web.get("/playground.html")).status == 404

    tried(scenario)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")
def test_the_page_goes_on_after_a_reload(tried: Any) -> None:
    """Not a word is missing or double; what is cancelled on the page ends."""

    async def scenario(web: Web) -> None:
        folder = Path(__file__).parent
        script = folder.parents[1] / "adapters" / "http" / "playground.js"
        command = ("node", str(folder / "playground_in_node.mjs"), str(script), web.url)
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        printed, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, errors.decode()
        seen = orjson.loads(printed)
        assert 5 < len(seen["before"]) < len(seen["whole"]) and seen["whole"].startswith(seen["before"])
        assert seen["after"] == seen["kept"] == seen["whole"]

    tried(scenario)


def test_a_browser_of_an_allowed_origin(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        origin = {"Origin": "https://app.example.org"}
        asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = await web.ask("OPTIONS", "/v1/chat/completions", headers=asked)
        assert preflight.status == 204 and preflight.headers["Access-Control-Allow-Headers"] == "authorization"
        for path, status in (("/v1/models", 401), ("/v1/nope", 401), ("/healthz", 200)):
            answer = await web.get(path, headers=origin)
            assert answer.status == status
            assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example.org"
            assert "x-request-id" in answer.headers["Access-Control-Expose-Headers"]
        other = await web.get("/healthz", headers={"Origin": "https://evil.example"})
        assert "Access-Control-Allow-Origin" not in other.headers

    tried(scenario, cors_origins="https://app.example.org", api_keys="a-key")

"""schemathesis over the server's own OpenAPI document: valid and invalid requests for each schema.

One check is off: that every request of the schema is accepted. The schema can't say what depends
on the model (vocabulary, context, chat template) or on other fields; such requests get a 400 that
names the field. For longer runs:
`schemathesis run URL/openapi.json --exclude-checks positive_data_acceptance --max-examples 500`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from serve_process import Running

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
EXAMPLES = 8


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="schemathesis is not installed")
def test_the_document_and_the_server_agree(server: Running, tmp_path: Path):
    options = [
        "--exclude-checks",
        "positive_data_acceptance",
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        "1",
        "--continue-on-failure",
    ]
    options += ["--suppress-health-check", "all", "--request-timeout", "60", "--no-color"]
    engine = server.engine.pid
    found = subprocess.run(
        [SCHEMATHESIS, "run", f"{server.url}/openapi.json", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert server.engine.pid == engine

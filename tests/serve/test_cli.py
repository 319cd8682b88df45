"""The command line: help, flags, errors, and commands with a model of tiny random weights."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from serve_process import ROOT, Running

from counterpoint.cli import run_command
from counterpoint.config import SECTIONS, Config, ConfigError
from counterpoint.flags import config_flags


def cli(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command line. One that hangs is made to show where."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        "NO_COLOR": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    command = [sys.executable, "-m", "counterpoint", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    )
    try:
        out, err = process.communicate(stdin, timeout=90)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, err = process.communicate()
        pytest.fail(f"{arguments} hangs:\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# ---------------------------------------------------------------- help


def test_help_imports_nothing_heavy():
    heavy = [
        "torch",
        "transformers",
        "fastapi",
        "tokenizers",
        "numpy",
        "pydantic",
        "uvicorn",
        "httpx",
    ]
    code = (
        "import sys; from counterpoint.cli import run_command; "
        "status = [run_command([*c, '--help']) for c in ([], ['serve'])]; "
        f"print('heavy:', [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert "heavy: []" in done.stdout
    for word in (
        "serve",
        "chat",
        "generate",
        "batch",
        "pull",
        "models",
        "bench",
        "simulate",
        "demo",
        "--version",
        "Measure",
    ):
        assert word in done.stdout


def test_every_setting_is_a_flag_with_its_help_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "400")
    assert run_command(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            assert (
                f"--{field.name.replace('_', '-')}" in text and field.metadata["help"][:40] in text
            )
            if field.default not in (None, ""):
                assert f"[default: {field.default}]".lower() in text.lower()


def test_version():
    from counterpoint import __version__

    assert cli("--version").stdout.strip() == __version__


# ---------------------------------------------------------------- flags and file


@config_flags("scheduler", "device")
def command(name: str = "", *, config: Config) -> tuple[str, Config]:
    return name, config


def test_flags_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "scheduler: {policy: multiplex, max_running: 7, prefix_cache: false}\nserver: {port: 9}"
    )
    _, config = command("x", config=str(file), policy="auto", page_tokens=32)
    assert config.scheduler.policy == "auto", "a flag that names the default beats the file too"
    assert (config.scheduler.max_running, config.scheduler.prefix_cache, config.server.port) == (
        7,
        False,
        9,
    )
    assert config.device.page_tokens == 32 and config.model == Config().model
    assert command("y") == ("y", Config())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scheduler: {polcy: auto}", "polcy"),
        ("schedler: {}", "schedler"),
        ("scheduler: [auto]", "scheduler"),
        ("device: {cores: 'two'}", "cores"),
        ("device: {cores: true}", "cores"),
        ("scheduler: {max_running: 1" + "0" * 30 + "}", "max_running"),
        ("scheduler: {ttft_s: 1" + "0" * 400 + "}", "ttft_s"),
        ("scheduler: {ttft_s: .nan}", "ttft_s"),
        ("model: {model: ''}", "model is empty"),
        ("model: " + "[" * 5000, "not YAML"),
    ],
)
def test_a_wrong_key_of_the_file_is_named(tmp_path: Path, text: str, words: str):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        command("x", config=str(tmp_path / "run.yaml"))


def test_a_section_with_nothing_in_it_says_nothing(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("scheduler:\n  # policy: serial\nserver: {port: 9}")
    assert command("x", config=str(tmp_path / "run.yaml"))[1] == Config().replace(port=9)


def test_a_file_in_another_encoding_is_named(tmp_path: Path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        command("x", config=str(tmp_path / "run.yaml"))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--policy", "best"], "multiplex"),
        (["serve", "--kv-pages", "0"], "kv_pages"),
        (["serve", "--port", "70000"], "port"),
        (["serve", "smolm2"], "smollm2"),
        (["serve", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["pull", "gpt-9"], "gpt-9"),
        (["generate"], "--prompt"),
        (["chat", "--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["chat", "--temperature", "nan"], "--temperature"),
        (["generate", "--prompt", "a", "--top-p", "nan"], "--top-p"),
        (["bench"], "--url"),
        (["batch", "nowhere.jsonl", "-o", "out.jsonl"], "nowhere.jsonl"),
        (["serve", "--drain-s", "nan"], "drain_s"),
        (["serve", "--host", "192.0.2.1"], "--host"),
        (["simulate", "--json", "/nowhere/out.json"], "--json"),
        (["simulate", "--timeline", "/"], "--timeline"),
        (["simulate", "--event-log", "/nowhere/log"], "--event-log"),
        (["simulate", "--requests", "1", "--json", "/dev/full"], "/dev/full: No space left"),
        (["simulate", "--requests", "1", "--timeline", "/dev/full"], "/dev/full: No space left"),
        (["simulate", "--requests", "1", "--event-log", "/dev/full"], "/dev/full: No space left"),
        (["simulate", "--depth", "0"], "--depth"),
        (
            ["simulate", "--gpu", "a100", "--kv-cache-dtype", "fp8"],
            "kv_cache_dtype is fp8, which a100 lacks",
        ),
        (
            ["simulate", "--gpu", "8xa100", "--quantization", "fp8"],
            "quantization is fp8, which 8xa100 lacks",
        ),
        (["simulate", "--host-overhead", "inf"], "--host-overhead"),
        (["simulate", "--belief-error", "5"], "--belief-error"),
        (["simulate", "--link-bytes-per-s", "nan"], "link_bytes_per_s"),
        (["plan", "--json", "/nowhere/out.json"], "--json"),
        (["bench", "--in-process", "--warmup", "-1"], "--warmup"),
        (["bench", "--url", "http://127.0.0.1:9", "--timeout", "nan"], "--timeout"),
        (["bench", "--in-process", "--save-load", "/nowhere/load.jsonl"], "--save-load"),
        (["compare", "loads.yaml", "--json", "/nowhere/out.json"], "--json"),
        (["calibrate", "--budget", "nan"], "--budget"),
        (["calibrate", "--seed", "-1"], "--seed"),
        (["calibrate", "--out", "/"], "--out"),
        (["demo", "--seconds", "nan"], "--seconds"),
        (["calibrate", "--json", "/nowhere/out.json"], "--json"),
        (["plan", "--policy", "chunked"], "--modes"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and words in err and len(err.strip().splitlines()) == 1


def test_a_mistake_ends_the_process_so():
    done = cli("serve", "--kv-pages", "0")
    assert (done.returncode, done.stdout) == (
        2,
        "",
    ) and done.stderr.strip() == "kv_pages is 0: it must be more than 0"


# ---------------------------------------------------------------- commands


def test_models_lists_names():
    listed = cli("models").stdout
    assert "smollm2" in listed and "SmolLM2-135M" in listed and "dummy" in listed


def test_generate(tiny: str, capsys: pytest.CaptureFixture[str]):
    flags = [
        "--load-format",
        "dummy",
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--seed",
        "3",
        "--policy",
        "chunked",
    ]
    said = []
    for _ in range(2):
        assert run_command(["generate", tiny, "--prompt", "once", *flags]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len(said[0]) > 1
    assert run_command(["generate", tiny, "--prompt", "one", "--prompt", "two", *flags]) == 0
    assert capsys.readouterr().out.count("---") == 1
    assert run_command(["generate", tiny, "--prompt", "x" * 600, *flags]) == 2
    err = capsys.readouterr().err
    assert "512" in err and "600" in err


def test_serve_with_a_real_engine(tiny: str, tmp_path: Path, own_server: Callable[..., Running]):
    command = [
        sys.executable,
        "-m",
        "counterpoint",
        "serve",
        tiny,
        "--load-format",
        "dummy",
        "--port",
        "0",
    ]
    server = own_server(
        command=[*command, "--policy", "multiplex", "--served-name", "tiny"]
    ).wait_ready()
    body = {
        "model": "tiny",
        "prompt": "once upon",
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
    }
    whole = server.post("/v1/completions", body).json()
    assert whole["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    events = server.events(body)[:-1]
    assert "".join(c["text"] for e in events for c in e["choices"]) == whole["choices"][0]["text"]
    assert all(len(top) == 2 for top in whole["choices"][0]["logprobs"]["top_logprobs"])
    told = server.post("/v1/completions", body | {"echo": True, "max_tokens": 0}).json()["choices"][
        0
    ]
    assert len(told["logprobs"]["token_logprobs"]) == 9 and all(
        value < 0 for value in told["logprobs"]["token_logprobs"][1:]
    )
    assert server.stop() == 0
    assert "tiny" in server.said() and "multiplex" in server.said()


def test_chat_with_a_server(server: Running):
    done = cli("chat", "--url", server.url, stdin="hello there\n/clear\nand again\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert "hello there" in done.stdout and "and again" in done.stdout


def test_chat_with_an_own_engine(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand again\n"))
    flags = ["--load-format", "dummy", "--max-tokens", "4", "--policy", "chunked", "--seed", "1"]
    assert run_command(["chat", tiny, *flags]) == 0
    assert capsys.readouterr().out.count("> ") >= 3

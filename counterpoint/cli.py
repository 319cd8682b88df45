"""The command line.

Owns: the commands' names, their own flags, and how errors are shown. A user's mistake is one red
line and exit status 2, never a traceback. `--help` imports nothing heavy.
Must not: do the work of a command.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter
from rich.console import Console

from counterpoint import __version__
from counterpoint.config import Config
from counterpoint.flags import config_flags
from counterpoint.types import Role

if TYPE_CHECKING:
    from counterpoint.serve.text.output_processor import OutputPiece

USE = Group("Use a model", sort_key=0)
MEASURE = Group("Measure", sort_key=1)
MODELS = Group("Models", sort_key=2)
ASKING = Group("Question and answer", sort_key=0)
JOINING = Group("Worker", sort_key=0)

app = App(
    name="counterpoint",
    version=__version__,
    help="An LLM serving engine in which prefill and decode run side by side.",
    help_format="plaintext",
)
app["--help"].group = app["--version"].group = Group("Other", sort_key=9)


def flag(help: str) -> Parameter:
    return Parameter(help=help, group=ASKING, negative=())


Temperature = Annotated[float, flag("0: always the likeliest token")]
TopP = Annotated[float, flag("sample among the likeliest tokens with this sum of probabilities")]
Seed = Annotated[int | None, flag("the same seed gives the same answers")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    url: Annotated[
        str | None, flag("chat with a running server instead; API key from OPENAI_API_KEY")
    ] = None
    system: Annotated[str | None, flag("system message")] = None
    max_tokens: Annotated[int | None, flag("longest answer; unset: as the context allows")] = None
    temperature: Temperature = 0.7
    top_p: TopP = 0.95
    seed: Seed = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    prompt: Annotated[list[str], flag("the text to continue; may be given several times")]
    max_tokens: Annotated[int, flag("longest answer")] = 128
    temperature: Temperature = 0.7
    top_p: TopP = 0.95
    seed: Seed = None
    stop: Annotated[list[str] | None, flag("end before this text; may be given several times")] = (
        None
    )
    ignore_eos: Annotated[
        bool, flag("generate --max-tokens tokens even if the model ends earlier")
    ] = False


@app.command(group=USE)
@config_flags("model", "device", "scheduler", "server", "cluster")
def serve(config: Config) -> int:
    """Serve a model behind the OpenAI API.

    counterpoint serve

    counterpoint serve ./Qwen3-0.6B --policy multiplex --port 9000

    counterpoint serve ./Qwen3-0.6B --prefill 2 --decode 2
    """
    from counterpoint.builder import system_builder

    if config.server.api_key is None:
        config = config.replace(api_key=os.environ.get("COUNTERPOINT_API_KEY") or None)
    config = with_cluster_token(config)
    if config.cluster.ray_address is not None:
        # A cluster that we start sends no usage statistics.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Without this, a lost head ends this process after a minute.
        os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "2000000"  # noqa: SIM112
    source = system_builder.find_model(config)
    from counterpoint.serve.server import run

    return run(config, source)


@app.command(group=USE)
@config_flags("model", "device", "scheduler", "cluster")
def worker(
    *,
    join: Annotated[
        str,
        Parameter(
            help="HOST:PORT where `counterpoint serve --cluster-listen` waits", group=JOINING
        ),
    ],
    role: Annotated[Role, Parameter(help="what it does for the others", group=JOINING)] = Role.BOTH,
    name: Annotated[
        str | None,
        Parameter(help="unique in the cluster; unset: role and host name", group=JOINING),
    ] = None,
    config: Config,
) -> int:
    """Be a worker of a server on another machine.

    counterpoint serve ./Qwen3-0.6B --cluster-listen 10.0.0.1:7000 --cluster-token-file token

    counterpoint worker ./Qwen3-0.6B --join 10.0.0.1:7000 --role decode --cluster-token-file token
    """
    from counterpoint.serve.worker.worker_process import join as join_server

    return join_server(with_cluster_token(config), join, role, name)


@app.command(group=USE)
@config_flags("model", "device", "scheduler")
def chat(*, options: ChatOptions = ChatOptions(), config: Config) -> None:
    """Chat with a model in the terminal."""
    from counterpoint.serve.offline.chat import local_speaker, remote_speaker, run_chat
    from counterpoint.serve.offline.engine import OfflineEngine

    sampling = drop_unset(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    console = Console()
    if options.url is not None:
        speaker = remote_speaker(options.url, os.environ.get("OPENAI_API_KEY"), sampling)
        run_chat(speaker, console, options.system)
        return
    with console.status("starting the engine") as status:
        engine = OfflineEngine(config, status.update)
    with engine:
        run_chat(local_speaker(engine, sampling), console, options.system)


@app.command(group=USE)
@config_flags("model", "device", "scheduler")
def generate(*, options: GenerateOptions, config: Config) -> None:
    """Continue a text, without a server.

    counterpoint generate --prompt "The capital of France is" --max-tokens 8 --temperature 0
    """
    from counterpoint.serve.offline.engine import OfflineEngine

    sampling = drop_unset(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )
    with Console(stderr=True).status("starting the engine") as status:
        engine = OfflineEngine(config, status.update)
    with engine:
        show_completions(engine.complete(options.prompt, **sampling), len(options.prompt))


@app.command(group=USE)
@config_flags("model", "device", "scheduler")
def batch(
    file: Annotated[Path, flag("requests in OpenAI's batch format, a line of JSON each")],
    *,
    out: Annotated[
        Path,
        Parameter(
            name=("--out", "-o"),
            help="file of answers; those already in it are kept",
            group=ASKING,
        ),
    ],
    config: Config,
) -> int:
    """Answer a file of requests, without a server. Run it again to resume after an interruption.

    counterpoint batch requests.jsonl -o answers.jsonl --model smollm2
    """
    from rich.progress import Progress

    from counterpoint.serve.offline.batch import answer_lines, remaining_lines
    from counterpoint.serve.offline.engine import OfflineEngine

    lines, console = remaining_lines(file, out), Console(stderr=True, highlight=False)
    if not lines:
        console.print(f"nothing is left to do: {out} has every answer", soft_wrap=True)
        return 0
    with console.status("starting the engine") as status:
        engine = OfflineEngine(config, status.update)
    with engine, Progress(console=console) as bar:
        task = bar.add_task("answering", total=len(lines))
        failed = answer_lines(
            lines, out, engine, lambda done, failed, total: bar.update(task, completed=done)
        )
    console.print(f"{len(lines)} answered, {failed} of them with an error: {out}", soft_wrap=True)
    return 1 if failed else 0


def show_completions(pieces: Iterable[tuple[int, OutputPiece]], count: int) -> None:
    """Prints one answer as it arrives; several after the last has ended, in their order."""
    answers = [""] * count
    for choice, piece in pieces:
        answers[choice] += piece.text
        if count == 1:
            print(piece.text, end="", flush=True)
    print() if count == 1 else print("\n---\n".join(answers))


@app.command(group=MODELS)
def pull(name: str) -> None:
    """Fetch a model by name."""
    from counterpoint.builder import system_builder
    from counterpoint.spec.source import pull_model

    pull_model(name, print, system_builder.cache_folder())


@app.command(group=MODELS)
def models() -> None:
    """List the models that have a name."""
    from rich.table import Column, Table

    from counterpoint.builder import system_builder
    from counterpoint.spec.model import SHAPES_ONLY
    from counterpoint.spec.presets import PRESETS
    from counterpoint.spec.source import NAMED_MODELS, find_pulled

    table = Table("name", "what it is", Column("where", overflow="fold"), box=None)
    for name, package in NAMED_MODELS.items():
        file = find_pulled(name, system_builder.cache_folder())
        where = str(file) if file else f"[dim]counterpoint pull {name}[/dim]"
        table.add_row(name, package.about, where)
    for name, spec in PRESETS.items():
        use = "simulate" if spec.family in SHAPES_ONLY else "--load-format dummy, or simulate"
        table.add_row(
            name,
            f"{spec.family}, {spec.layers} layers, {spec.hidden} wide, "
            f"context {spec.max_context_tokens:,}",
            f"[dim]a shape: {use}[/dim]",
        )
    Console().print(table)


for path, name, about in (
    ("bench.command:bench", "bench", "Play a load against a server or engine."),
    ("bench.calibrate:command", "calibrate", "Measure what steps take on this device."),
    ("simulator.simulate:command", "simulate", "Play a load against a simulated device."),
    ("simulator.plan:command", "plan", "Find which mode serves a load best."),
    ("simulator.compare:command", "compare", "Play the same loads here and in the simulator."),
    ("bench.demo:demo", "demo", "Compare the latency of all policies under one load."),
):
    app.command(f"counterpoint.{path}", name=name, group=MEASURE, help=about)


def with_cluster_token(config: Config) -> Config:
    """`config` with the cluster's token from the environment, unless it is set."""
    if config.cluster.cluster_token is not None or config.cluster.cluster_token_file is not None:
        return config
    return config.replace(cluster_token=os.environ.get("COUNTERPOINT_CLUSTER_TOKEN") or None)


def drop_unset(**options: Any) -> dict[str, Any]:
    """The options that are set. Raises ValueError for NaN, which JSON can't hold."""
    for name, value in options.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be a number")
    return {name: value for name, value in options.items() if value is not None}


# ---------------------------------------------------------------- errors


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Runs a command line; returns its exit status. COUNTERPOINT_TRACEBACK=1 shows tracebacks."""
    try:
        result = app(
            arguments, exit_on_error=False, print_error=False, result_action="return_value"
        )
        return result if isinstance(result, int) else 0
    except CycloptsError as error:
        return print_error(str(error), 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MemoryError) as error:
        # Bad settings or flags, an unreachable URL, a full disk, a request for too much memory.
        if os.environ.get("COUNTERPOINT_TRACEBACK"):
            raise
        return print_error(describe_error(error), 2)


def describe_error(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"not enough memory: {str(error) or 'a number is too large for this machine'}"
    if isinstance(error, OSError) and error.strerror is not None:
        return (
            f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
        )
    return str(error)


def print_error(message: str, status: int) -> int:
    Console(stderr=True, highlight=False).print(
        message.strip(), style="red", markup=False, soft_wrap=True
    )
    return status

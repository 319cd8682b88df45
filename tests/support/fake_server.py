"""`python fake_server.py '{"port": 0, ...}'`: the real server over the engine of fake_engine.py.

The argument has flat settings. `folder`: one of tokenizer files, instead of byte tokens.
"""

import json
import sys

from counterpoint.config import Config, ConfigError
from counterpoint.serve.server import run
from counterpoint.spec.source import ModelSource

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    system = settings.pop("system", "fake_engine:system")
    folder = settings.pop("folder", "")
    source = ModelSource("hf", folder, "echo") if folder else ModelSource("spec", "", "echo")
    try:
        sys.exit(run(Config().replace(**settings), source, system))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)

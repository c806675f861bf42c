"""The launcher with stand-ins for both programs: `python -m tests.unit.deploy.fake_launch --config launch.yaml`.

The stand-ins are this file, run as `server CONFIG` or `learner CONFIG`. They follow the words in the configuration's
model name, and print `NAME pid PID devices DEVICES` first, so that a test knows what ran, in which order, and is gone:

    server  fine | never (ready) | dies (at start) | leaves (once it was asked whether it is ready)
            stubborn: ignores SIGTERM, and so does its child
    learner exits-N | waits
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import yaml


def server(config: dict[str, object], words: str) -> None:
    if "stubborn" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # inherits what is ignored
        say("child", child.pid)
    if "dies" in words:
        sys.exit("out of memory, said the fake")
    num_asked = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal num_asked
            num_asked += 1
            asked_rightly = (
                self.path == f"{config.get('url_prefix', '')}/ready/" and "Authorization" not in self.headers
            )
            self.send_response(200 if asked_rightly and "never" not in words else 503)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", int(str(config["port"]))), Handler) as http:
        http.timeout = 0.05
        while "leaves" not in words or num_asked < 1:
            http.handle_request()
    sys.exit(5)


def learner(words: str) -> None:
    if "exits-" in words:
        sys.exit(int(words.split("exits-")[1]))
    time.sleep(60)


def say(name: str, pid: int) -> None:
    print(name, "pid", pid, "devices", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)


def run_fake(name: str, path: str) -> None:
    config = yaml.safe_load(Path(path).read_text())
    say(name, os.getpid())
    if name == "server":
        server(config, Path(config["model"]).name)
    else:
        learner(Path(config["model"]["path"]).name)


def main() -> None:
    from deploy import launch

    launch.STOP_TIMEOUT_S = 1.0
    launch.server_argv = lambda config: [sys.executable, __file__, "server", config]
    launch.learner_argv = lambda config, nproc: [sys.executable, __file__, "learner", config]
    launch.main()


if __name__ == "__main__":
    if sys.argv[1] in ("server", "learner"):
        run_fake(*sys.argv[1:])
    else:
        main()

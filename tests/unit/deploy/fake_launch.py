"""The launcher with stand-ins for both programs: `python -m tests.unit.deploy.fake_launch --config launch.yaml`.

The stand-ins are this file, run as `server CONFIG` or `learner CONFIG`. They follow the words in the configuration's
model name, and print `NAME pid PID devices DEVICES` first, so that a test knows what ran, in which order, and is gone:

    server  fine | never (ready) | dies (at start) | leaves (once the learner runs)
            expires: once it was asked whether it is ready, an hour has passed
            stubborn: ignores SIGTERM, and so does its child
            leaves-N-times: its first N starts leave
            other: answers as another start of a server
    learner exits-N | waits | waits-for-N-M: until servers were ready N times, and the launcher has noticed M ends
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import yaml

HOUR = "an_hour_later"


def server(config: dict[str, object], words: str, starts: Path) -> None:
    if "stubborn" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # inherits what is ignored
        say("child", child.pid)
    if "dies" in words:
        sys.exit("out of memory, said the fake")
    learning = starts.with_name("learning")
    leaves = "leaves" in words and not ("times" in words and starts.stat().st_size > int(words.split("-")[1]))
    answer = json.dumps({"server_id": "old" if "other" in words else os.environ["ROLLOUT_SERVER_ID"]}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_rightly = (
                self.path == f"{config.get('url_prefix', '')}/ready/" and "Authorization" not in self.headers
            )
            is_ready = asked_rightly and "never" not in words
            self.send_response(200 if is_ready else 503)
            self.end_headers()
            self.wfile.write(answer)
            if is_ready:
                starts.with_name(f"{os.getpid()}.ready").touch()
            if "expires" in words:
                starts.with_name(HOUR).touch()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", int(str(config["port"]))), Handler) as http:
        http.timeout = 0.05
        while not (leaves and learning.exists()):
            http.handle_request()
    sys.exit(5)


def learner(words: str, folder: Path) -> None:
    (folder / "learning").touch()
    if "exits-" in words:
        sys.exit(int(words.split("exits-")[1]))
    if "waits-for-" in words:
        num_ready, num_ended = map(int, words.split("-")[2:])
        while True:
            pids = [path.stem for path in folder.glob("*.ready")]
            if len(pids) == num_ready and sum(not Path(f"/proc/{pid}").exists() for pid in pids) == num_ended:
                sys.exit(0)
            time.sleep(0.05)
    time.sleep(60)


def say(name: str, pid: int) -> None:
    print(name, "pid", pid, "devices", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)


def run_fake(name: str, path: str) -> None:
    config = yaml.safe_load(Path(path).read_text())
    say(name, os.getpid())
    if name == "server":
        starts = Path(f"{path}.starts")  # one byte for each
        with starts.open("a") as file:
            file.write("x")
        server(config, Path(config["model"]).name, starts)
    else:
        learner(Path(config["model"]["path"]).name, Path(path).parent)


def main() -> None:
    from deploy import launch
    from shared import waits

    hour = Path(sys.argv[sys.argv.index("--config") + 1]).with_name(HOUR)
    awake_s = waits.awake_s
    waits.awake_s = lambda: awake_s() + 3600.0 * hour.exists()
    launch.STOP_TIMEOUT_S = 1.0
    launch.server_argv = lambda config: [sys.executable, __file__, "server", config]
    launch.learner_argv = lambda config, *numbers: [sys.executable, __file__, "learner", config]
    launch.BACK_OFF_S = 0.1
    launch.main()


if __name__ == "__main__":
    if sys.argv[1] in ("server", "learner"):
        run_fake(*sys.argv[1:])
    else:
        main()

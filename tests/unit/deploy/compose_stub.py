"""Stands for both programs in `tests/integration/try_compose.sh --quick`. It needs what they need of a container: a
configuration, a token, places to write, shared memory that outlives a server, and the other container under its
name."""

import http.server
import os
import sys
import time
import urllib.request
from pathlib import Path

URL = "http://server-0:8000/ready/"
DEADLINE_S = time.monotonic() + 120
RUN = Path("runs/compose-demo")


def check_container() -> None:
    assert "model" in Path(sys.argv[sys.argv.index("--config") + 1]).read_text()
    assert os.environ["ROLLOUT_SERVER_TOKEN"]
    assert os.getuid() != 0
    assert Path("data/compose-demo/train.jsonl").read_text()
    assert Path("deploy/demo/checkpoint/config.json").is_file()
    for folder in ("/tmp", "/cache", "/dev/shm", "runs"):
        Path(folder, f"written-by-{os.uname().nodename}").touch()
    for folder in ("/app", "/etc", "data", "/usr"):
        try:
            Path(folder, "written").touch()
        except OSError:
            continue
        raise AssertionError(f"{folder} can be written")


class Ready(http.server.BaseHTTPRequestHandler):
    """Answers with what a start of the server does not share with the next one, and with what it must share."""

    answer = f"{time.time_ns()} {Path('/dev/shm').stat().st_dev}"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve() -> None:
    print("stub server ready", flush=True)
    http.server.HTTPServer(("0.0.0.0", 8000), Ready).serve_forever()


def learn() -> None:
    """A step is an answer. The run ends three steps after the server was started again."""
    RUN.mkdir(exist_ok=True)
    starts: dict[str, str] = {}
    after = 0
    with (RUN / "metrics.jsonl").open("a") as metrics:
        while after < 3:
            assert time.monotonic() < DEADLINE_S, "the server was not started again"
            time.sleep(0.2)
            try:
                with urllib.request.urlopen(URL, timeout=2) as reply:
                    start, device = reply.read().decode().split()
            except OSError as error:
                print(f"stub learner: {error}", flush=True)
                continue
            starts[start] = device
            after += len(starts) > 1
            print('{"event": "step"}', file=metrics, flush=True)
    assert set(starts.values()) == {str(Path("/dev/shm").stat().st_dev)}, starts
    code = RUN / "exit-code"
    sys.exit(int(code.read_text()) if code.exists() else 0)


if __name__ == "__main__":
    check_container()
    learn() if "learner" in sys.argv else serve()

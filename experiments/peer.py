"""The peer's environment and its process, as seen from kvmem's side.

torch and transformers are no dependency of kvmem, so they live in an environment of
their own, made once. The law: the peer stands still unless it was asked something. It
is stopped by a signal between jobs, so none of its threads spins while kvmem is timed;
and kvmem waits while the peer works.

    with Peer(config, gguf_path) as peer:
        peer.ask("prefill", prompt=[504, 3575])["seconds"]
"""

import dataclasses
import glob
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from typing import Any

from kvmem import errors

__all__ = ["Peer", "PeerConfig"]

_WORKER = pathlib.Path(__file__).with_name("peer_transformers.py")
_STAMP = "peer.stamp"


@dataclasses.dataclass(frozen=True)
class PeerConfig:
    """Who is compared with.

    Args:
        run: compare at all; without it only kvmem's own figures are taken.
        python: an interpreter that has the requirements; None: one made in `folder`.
        folder: of the environment that is made.
        base: the interpreter that the environment is made of: a name on the PATH, or
            the beginning of a version among pyenv's.
        requirements: what is installed there.
        threads: of torch; 0: one for each core that kvmem may use.
    """

    run: bool = True
    python: str | None = None
    folder: str = ".venvs/peer"
    base: str = "python3.11"
    requirements: tuple[str, ...] = (
        "torch==2.13.0",
        "transformers==5.24.0",
        "gguf==0.19.0",
        "accelerate==1.15.0",  # transformers asks for it to load a GGUF file
    )
    threads: int = 0


class Peer:
    """A process that holds the peer's model, stopped between jobs."""

    def __init__(self, config: PeerConfig, gguf_path: pathlib.Path):
        python = config.python or _made(config)
        self.threads = config.threads or len(os.sched_getaffinity(0))
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [python, str(_WORKER), str(gguf_path), str(self.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            text=True,
        )
        self.about = self.ask("about")

    def __enter__(self) -> "Peer":
        """Return the peer."""
        return self

    def __exit__(self, *_) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def ask(self, job: str, **arguments: Any) -> dict[str, Any]:
        """Let the peer run until it has answered.

        Raises:
            KVMemError: it ended instead; its own last words are in the message.
        """
        self._process.send_signal(signal.SIGCONT)
        try:
            print(
                json.dumps({"job": job} | arguments),
                file=self._process.stdin,
                flush=True,
            )
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._ended(job)
        self._process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def cpu_seconds(self) -> float:
        """Return the seconds of processor time that the process has used (Linux)."""
        stat = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _ended(self, job: str) -> errors.KVMemError:
        code = self._process.wait()
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").strip()[-2000:]
        return errors.KVMemError(
            errors.say(
                f"job {job!r} of the peer",
                f"its process ended with code {code}: {words}",
                "Mend what it says, or set peer.run=false",
            )
        )


def _made(config: PeerConfig) -> str:
    """Return the interpreter of the peer's environment, made if it is not there."""
    folder = pathlib.Path(config.folder).absolute()
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = "\n".join(config.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    print(f"{config.folder}: an environment for the peer (once; a few minutes)")
    shutil.rmtree(folder, ignore_errors=True)
    _run([_base(config.base), "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", *config.requirements])
    stamp.write_text(wanted)
    return str(python)


def _base(name: str) -> str:
    """Find an interpreter that really runs: a name on the PATH may be a mere shim."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    version = name.removeprefix("python")
    found = sorted(glob.glob(f"{pyenv}/versions/{version}*/bin/python"))
    tried = [path for path in (shutil.which(name), *found) if path]
    for path in tried:
        works = subprocess.run(
            [path, "-c", "import venv, ensurepip"], check=False, capture_output=True
        )
        if works.returncode == 0:
            return path
    raise errors.ConfigError(
        errors.say(
            f"peer.base = {name!r}",
            f"none of {', '.join(tried) or 'the PATH and pyenv'} runs with venv",
            "Install it, name another with --set peer.base=..., or give an "
            "interpreter that has the requirements with --set peer.python=...",
        )
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise errors.ConfigError(
            errors.say(
                f"`{' '.join(command)}`",
                f"it ended with code {done.returncode}: {done.stderr.strip()[-2000:]}",
                "Mend what it says, or give --set peer.python=...",
            )
        )

"""The hook path on SGLang 0.5.14, in an environment of its own: states equal transformers, chunked or not, TP too.

    python tests/server/check_sglang_0_5_14.py --env FOLDER      makes an environment there (minutes the first time)
    python tests/server/check_sglang_0_5_14.py --python PYTHON   uses one that has SGLang 0.5.14 and eagle3-data
    python tests/server/check_sglang_0_5_14.py --python PYTHON --sglang 0.5.17    another version of the hook path

Prints one line per check; exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from eagle3_data.errors import ServerError  # noqa: E402
from eagle3_data.protocol import AUX, LAST, ids_digest  # noqa: E402
from eagle3_data.server.client import Sampling  # noqa: E402
from eagle3_data.server.doctor import diagnose  # noqa: E402
from eagle3_data.server.process import ServerProcess  # noqa: E402
from tests.models import expected_states, tiny_model  # noqa: E402
from tests.servers import RunningServer, capture_config, captured, prompt  # noqa: E402

REQUIREMENTS = Path(__file__).with_name("sglang_0_5_14.txt")
"""What SGLang's server imports; its own dependency list pulls CUDA builds of several GB."""
WITHOUT_DEPENDENCIES = ("sglang==0.5.14", "compressed-tensors", "xgrammar==0.2.1", str(ROOT))
LENGTHS = (63, 64, 65, 128, 1000)

failures = 0


def report(what: str, ok: bool, detail: str = "") -> None:
    global failures
    failures += not ok
    print(f"{'ok    ' if ok else 'FAILED'} {what}{': ' + detail if detail else ''}", flush=True)


def make_environment(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", REQUIREMENTS], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *WITHOUT_DEPENDENCIES], check=True)
    return python


async def check_states(server: RunningServer, kind: str, version: str, exact: bool) -> None:
    async with server.client() as client:
        (info,) = await client.capture_infos()
        report(
            f"{kind}: path",
            info.path == "hooks" and info.sglang_version == version,
            f"{info.path} {info.sglang_version}",
        )
        for tokens in LENGTHS:
            ids, rid = prompt(tokens, tokens), f"e3d-old-{kind}{tokens}-0"
            reply = await client.prefill(ids, rid)
            meta, tensors = await captured(server, rid)
            wanted = expected_states(server.model, ids)
            pairs = ((tensors[LAST], wanted.hidden[-1]), (tensors[AUX], wanted.aux(info.layers)))
            worst = max(float((found - right).abs().max() / right.abs().max()) for found, right in pairs)
            whole = meta.tokens == tokens and meta.ids_digest == ids_digest(ids) and meta.finite
            right = whole and meta.next_token == reply.output_ids[0] and worst <= (0.0 if exact else 1e-5)
            report(
                f"{kind}: {tokens} tokens", right, f"{len(tensors[LAST])} rows, largest relative difference {worst:.1e}"
            )
        prompts = [prompt(256, 500 + i) for i in range(24)]

        async def one(i: int) -> bool:
            await client.generate(prompts[i], rid=f"foreign-{i}", sampling=Sampling(max_new_tokens=2))
            await client.prefill(prompts[i], f"e3d-old-{kind}s{i}-0")
            _, tensors = await captured(server, f"e3d-old-{kind}s{i}-0")
            right = expected_states(server.model, prompts[i]).hidden[-1]
            return float((tensors[LAST] - right).abs().max() / right.abs().max()) < 1e-5

        same = await asyncio.gather(*(one(i) for i in range(len(prompts))))
        report(f"{kind}: 24 equal lengths in flight, foreign requests between", all(same), f"{sum(same)} right")
    diagnosis = await diagnose(server.url)
    bad = [f"{check.name}: {check.detail}" for check in diagnosis.checks if not check.ok]
    report(f"{kind}: doctor", not bad, "; ".join(bad))
    report(f"{kind}: nothing left in the spool", not server.files(), ", ".join(server.files()))


def run_kind(python: Path, version: str, kind: str, model: Path, *extra: str, exact: bool, tp: int = 1) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eagle3-check-") as folder:
        config = capture_config(model, Path(folder) / "spool", *extra, tp=tp, python=str(python))
        try:
            with ServerProcess(config, log=Path(folder) / "log", start_timeout_s=600) as process:
                server = RunningServer(kind, process.url, Path(folder) / "spool", model, process)
                asyncio.run(check_states(server, kind, version, exact))
        except ServerError as error:
            report(f"{kind}: server", False, str(error))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--env", type=Path, help="folder of the environment; made if missing")
    where.add_argument("--python", type=Path, help="an interpreter that has everything")
    parser.add_argument("--sglang", default="0.5.14", help="the version that PYTHON must turn out to have")
    options = parser.parse_args()
    python = options.python or make_environment(options.env)
    run_kind(python, options.sglang, "llama", tiny_model("llama"), exact=True)
    run_kind(python, options.sglang, "chunked", tiny_model("llama"), "--chunked-prefill-size", "64", exact=False)
    run_kind(python, options.sglang, "ranks", tiny_model("llama"), exact=False, tp=2)
    run_kind(python, options.sglang, "qwen3", tiny_model("qwen3"), exact=True)
    print(f"{failures} failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Time to the first token in vLLM on the CPU, of prefixes of 1K, 4K and 16K tokens: computed, from files, from FlatCake.

Runs in the environment of the vLLM tests: make .venv-vllm/.stamp, then .venv-vllm/bin/python bench/engine_vllm.py.

    no cache    vLLM alone; its own prefix cache is emptied before each request, here and below
    files       vLLM's ExampleConnector: a file a layer and prompt, on the same disk
    memory      FlatCake on a node of memory only
    SSD         FlatCake with all of it on SSD, read with O_DIRECT

All four are processes of their own, one after the other, in one run; each asks every prompt twice (stored by the first, timed
at the second) and takes the best of --rounds. Tokens must be those of vLLM alone. Of the FlatCake runs also: what a call of the
connector costs vLLM's scheduler thread, and the speed of the restore inside the connector beside the bare client's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from _support import GIB, MIB, Node, Report, arguments, disk_directory, say

PREFIXES = (1024, 4096, 16384)
BLOCK = 32
LOOKUP_US_MAX = 200.0
RESTORE_RATIO_MIN = 0.95


def ask_all(folder: Path, endpoint: str, kind: str, rounds: int) -> dict[str, Any]:
    """In a process of its own: the best time to the first token of each prefix, its tokens, and what the connector says."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    transfer: dict[str, Any] | None = None
    if kind == "files":
        transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        transfer["kv_connector_extra_config"] = {"shared_storage_path": str(folder / "files")}
    elif kind != "no cache":
        transfer = {
            "kv_connector": "FlatCakeConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_module_path": "flatcake_client.engines.vllm",
            "kv_connector_extra_config": {"endpoint": endpoint},
        }  # fmt: skip
    llm = LLM(
        str(folder / "model"), kv_transfer_config=transfer, skip_tokenizer_init=True, enforce_eager=True, block_size=BLOCK,
        dtype="bfloat16", max_model_len=max(PREFIXES) + BLOCK, num_gpu_blocks_override=1200, disable_log_stats=True,
    )  # fmt: skip
    core: Any = llm.llm_engine.engine_core.engine_core
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    found: dict[str, Any] = {"ttft_s": {}, "tokens": {}}
    calls = _timed_calls(core.scheduler.connector) if kind in ("memory", "SSD") else []
    for prefix in (BLOCK, *PREFIXES):  # the first warms up, and is not told
        times = []
        for number in range(rounds):
            ids = np.random.default_rng(prefix + number).integers(0, 256, prefix + 1).tolist()
            for _ in range(1 if kind == "no cache" else 2):
                llm.reset_prefix_cache()
                start_s = time.perf_counter()
                outputs = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
                took_s = time.perf_counter() - start_s
                deadline_s = time.monotonic() + 60
                while core.scheduler.has_requests() and time.monotonic() < deadline_s:
                    core.step_fn()
                if kind in ("memory", "SSD"):
                    _worker()._crew.settle(60)  # noqa: SLF001 - until the turn is stored
            times.append(took_s)
            found["tokens"][f"{prefix}/{number}"] = list(outputs[0].outputs[0].token_ids)
        if prefix in PREFIXES:
            found["ttft_s"][str(prefix)] = min(times)
    if calls:
        found["call_us_p50"], found["call_us_p99"] = np.percentile(calls, [50, 99]).tolist()
        found["loads"] = core.scheduler.connector._scheduler.tally.totals["loads"]  # noqa: SLF001
        found |= _restores(core)
    return found


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker  # noqa: SLF001


def _timed_calls(connector: Any) -> list[float]:
    """Microseconds of every call from now on that asks for a request's prefix, or whether the answer is there."""
    calls: list[float] = []

    def timing(asked: Any) -> Any:
        def timed(*rest: Any) -> Any:
            start = time.perf_counter()
            try:
                return asked(*rest)
            finally:
                calls.append((time.perf_counter() - start) * 1e6)

        return timed

    for name in ("on_new_request", "get_num_new_matched_tokens"):
        setattr(connector, name, timing(getattr(connector, name)))
    return calls


def _restores(core: Any, rounds: int = 15) -> dict[str, float]:
    """The longest prefix into vLLM's pages: as the connector's worker does it, and by the bare client. Best GB/s of each."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from flatcake_client.engines.vllm_jobs import Load, StepJobs

    worker = _worker()
    hasher = core.request_block_hasher
    ids = np.random.default_rng(max(PREFIXES)).integers(0, 256, max(PREFIXES) + 1).tolist()
    request = Request("bench", ids, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    blocks = max(PREFIXES) // BLOCK
    hashes, slots = tuple(request.block_hashes[:blocks]), np.arange(1, blocks + 1)
    space, pages = worker._space, worker._kv.pages  # noqa: SLF001
    size_bytes = blocks * space.spec.block_bytes
    inside, bare = [], []
    cpu_s = {"connector": 0.0, "client": 0.0}
    for number in range(rounds):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        job = Load(f"bench{number}", hashes, b"", 0, tuple(slots.tolist()), 1)
        worker.start(StepJobs(loads=(job,)))
        while not worker._restores.ended(1.0):  # noqa: SLF001
            pass
        inside.append(time.perf_counter() - start_s)
        cpu_s["connector"] += time.process_time() - start_cpu_s
        assert not worker.failures(), "blocks did not come"
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        with space.lookup(space.keys_of_hashes(hashes)) as hit:
            assert hit.restore(pages, slots).wait() == blocks
        bare.append(time.perf_counter() - start_s)
        cpu_s["client"] += time.process_time() - start_cpu_s
    speeds = {"connector_gb_s": size_bytes / min(inside) / 1e9, "client_gb_s": size_bytes / min(bare) / 1e9}
    return speeds | {f"{name}_cpu_ms": seconds / rounds * 1e3 for name, seconds in cpu_s.items()}


def run(folder: Path, kind: str, endpoint: str, rounds: int) -> dict[str, Any]:
    say(f"{kind} ...")
    command = [sys.executable, __file__, "--child", str(folder), endpoint or "-", kind, str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    options = arguments(__doc__, rounds=(3, "prompts of each length"))
    if importlib.util.find_spec("vllm") is None:
        say("no vLLM in this environment: make .venv-vllm/.stamp, then .venv-vllm/bin/python bench/engine_vllm.py")
        return
    import torch

    from flatcake_client.engines.models import ModelShape, make_model

    shape = ModelShape(
        family="qwen3", layers=4, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=128,
        context_tokens=32768, reach_tokens=2048,
    )  # fmt: skip
    results: dict[str, dict[str, Any]] = {}
    with disk_directory(options.dir, 4 * GIB) as folder:
        make_model(shape, dtype=torch.bfloat16).save_pretrained(folder / "model")
        for kind in ("no cache", "files"):
            results[kind] = run(folder, kind, "", options.rounds)
        for kind, memory_bytes in (("memory", 2 * GIB), ("SSD", 64 * MIB)):
            nodes = folder / kind
            nodes.mkdir()
            node = Node(nodes, memory_bytes=memory_bytes, ssd_bytes=4 * GIB)
            if kind == "memory":
                node._options["ssd_paths"] = ""  # noqa: SLF001 - a first turn's home is SSD wherever there is one
            with node:
                results[kind] = run(folder, kind, node.endpoint, options.rounds)
    show(results, shape.kv_bytes_per_token, as_json=options.json)


def show(results: dict[str, dict[str, Any]], token_bytes: int, *, as_json: bool) -> None:
    report = Report("time to the first token in vLLM on the CPU", more={"results": results})
    computed = results["no cache"]["ttft_s"]
    for kind, result in results.items():
        same = result["tokens"] == results["no cache"]["tokens"]
        for prefix, seconds in result["ttft_s"].items():
            detail = f"{computed[prefix] / seconds:.1f} x no cache; {int(prefix) * token_bytes / 1e6:.0f} MB"
            report.add(
                f"{kind}, {prefix} tokens, ms", seconds * 1e3, detail=detail + ("" if same else "; OTHER TOKENS")
            )
    for kind in ("memory", "SSD"):
        result = results[kind]
        report.add(
            f"a call on the scheduler thread, {kind}, us p50", result["call_us_p50"], LOOKUP_US_MAX, at_most=True,
            detail=f"p99 {result['call_us_p99']:.0f}",
        )  # fmt: skip
        report.add(
            f"restore, {kind}: connector / bare client", result["connector_gb_s"] / result["client_gb_s"],
            RESTORE_RATIO_MIN,
            detail=f"{result['connector_gb_s']:.2f} of {result['client_gb_s']:.2f} GB/s; "
            f"{result['connector_cpu_ms']:.1f} of {result['client_cpu_ms']:.1f} ms of CPU",
        )  # fmt: skip
    report.show(as_json=as_json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(ask_all(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))))
    else:
        main()

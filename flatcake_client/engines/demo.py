"""The demo: agents, chats and one-shot requests on one node, and kill -9 of engine and daemon in between.

    python -m flatcake_client.engines.demo [--json] [--directory DIR]

    1 a first day      agents begin and take a step, chats begin, one-shots come; one of these dies with the engine
    2 a new engine     knows nothing; agents and chats go on from what the daemon holds
    3 no daemon        killed; a request comes and is computed
    4 a new daemon     on the same directory: what was on SSD is there, what was in memory is computed once more and stored
    5 control          KV of the right size that is all zeros must give other tokens, or the demo would prove nothing

Each reply is compared with what the model says without any cache (demo_engine.py). Exit code 0: all tokens are identical, and the
control's are not; 1: not so; 3: the demo cannot run here. The model is made up (models.py), since nothing may be downloaded, but
an ordinary Qwen3 in bfloat16; a step of an agent is small beside its context, as it is in life (traces/README.md).
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from flatcake_client.engines.demo_command import Say, Told, command
from flatcake_client.engines.demo_processes import (
    DaemonProcess,
    EngineProcess,
    undisturbed,
)
from flatcake_client.engines.demo_report import Figures, Outcome, Record, document, show
from flatcake_client.raw_reads import raw_read_rates

KILL_AFTER_S: Final = 0.1
RESTORE_ROUNDS: Final = 40  # of some 10 ms
RAW_ROUNDS: Final = 4  # of a sweep of 12 settings


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the demo is. The defaults run in well under a minute on two cores; tests use less.

    Placement looks at contexts and replies, so the daemon's thresholds are scaled like them.
    """

    shape: dict[str, Any] = field(
        default_factory=lambda: {
            "family": "qwen3", "layers": 8, "hidden": 384, "intermediate": 768, "heads": 8, "kv_heads": 4,
            "head_dim": 128, "digit_base": 8, "reach_tokens": 1600,
        }
    )  # fmt: skip
    dtype: str = "bfloat16"
    block_tokens: int = 64
    system_tokens: int = 512
    agents: int = 3
    task_tokens: int = 768  # what an agent begins with, after the system prompt
    step_tokens: int = 150  # what a tool returns
    chats: int = 3
    message_tokens: int = 90
    one_shot_tokens: int = 80
    reply_tokens: int = 8
    one_shots_a_scene: int = 4
    agent_context_tokens: int = 1024
    short_reply_tokens: int = 64
    memory_bytes: int = 128 << 20
    ssd_bytes: int = 1 << 30

    @property
    def vocab(self) -> int:
        return int(self.shape["digit_base"] ** self.shape["kv_heads"])

    @property
    def setup(self) -> dict[str, Any]:
        return {"shape": self.shape, "dtype": self.dtype, "block_tokens": self.block_tokens}


@dataclass(slots=True)
class Talk:
    """One conversation. Its tokens are made up, too: a model with random weights speaks no language."""

    name: str
    kind: str
    tokens: list[int]
    previous_reply_tokens: int | None = None


class Story:
    """The scenes, in order. Owns both processes."""

    def __init__(self, scale: Scale, directory: Path, say: Say) -> None:
        self._scale, self._say = scale, say
        self._random = np.random.default_rng(7)
        self._system = self._fresh(scale.system_tokens)
        self._daemon = DaemonProcess(
            directory,
            *("--memory-bytes", str(scale.memory_bytes), "--ssd-bytes", str(scale.ssd_bytes)),
            *("--agent-context-tokens", str(scale.agent_context_tokens)),
            *("--short-reply-tokens", str(scale.short_reply_tokens)),
        )
        self._engine = EngineProcess(directory, self._daemon.endpoint, scale.setup)
        self._agents = [Talk(f"agent-{n}", "agents", self._system) for n in range(scale.agents)]
        self._chats = [Talk(f"chat-{n}", "chats", []) for n in range(scale.chats)]
        self._one_shots = 0
        self._scene = ""
        self._records: list[Record] = []

    def tell(self) -> Outcome:
        """Raises: DemoFailed: something other than tokens is wrong."""
        started_s = time.perf_counter()
        self._scene = "a first day"
        self._say("starting the daemon and an engine")
        self._daemon.start()
        self._engine.start()
        self._daemon.wait_ready()
        self._engine.wait_ready()
        self._agents_go_on(self._scale.task_tokens)
        self._chats_go_on()
        self._one_shots_come()
        self._agents_go_on(self._scale.step_tokens)
        self._chats_go_on()

        self._scene = "a new engine"
        self._say("kill -9 of the engine, while it answers a request; another one starts")
        self._engine.send(self._one_shot_request())
        self._engine.kill(after_s=KILL_AFTER_S)
        self._engine.start()
        self._engine.wait_ready()
        self._agents_go_on(self._scale.step_tokens)
        self._chats_go_on()
        self._one_shots_come()

        self._scene = "no daemon"
        self._say("kill -9 of the daemon")
        self._daemon.kill()
        self._one_shots_come(1)

        self._scene = "a new daemon"
        self._say("another daemon starts on the same directory")
        self._daemon.start()
        self._daemon.wait_ready()
        self._one_shots_come()  # the first of them computes the system prompt again
        self._agents_go_on(self._scale.step_tokens)
        self._chats_go_on()

        self._say("control: zeroed KV")
        zeroed_differ = self._control()
        self._say("measuring restores, beside the disk itself")
        figures = self._measure()
        self._say("checking that every byte is accounted for")
        return Outcome(
            records=self._records,
            zeroed_differ=zeroed_differ,
            figures=figures,
            engine=self._engine.ask({"do": "stats"}),
            law_holds=self._daemon.check(),
            seconds=time.perf_counter() - started_s,
        )

    def close(self) -> None:
        with undisturbed():
            self._engine.kill()
            self._daemon.kill()

    def _fresh(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._scale.vocab, count)]

    def _agents_go_on(self, tokens: int) -> None:
        for talk in self._agents:
            self._turn(talk, tokens, self._shared())

    def _chats_go_on(self) -> None:
        for talk in self._chats:
            self._turn(talk, self._scale.message_tokens, {})

    def _turn(self, talk: Talk, tokens: int, hints: dict[str, Any]) -> None:
        talk.tokens = [*talk.tokens, *self._fresh(tokens)]
        hints = hints | {"session": talk.name, "previous_reply_tokens": talk.previous_reply_tokens}
        reply = self._ask(talk.name, talk.kind, self._request(talk.tokens, hints))
        talk.tokens = [*talk.tokens, *reply]
        talk.previous_reply_tokens = len(reply)

    def _one_shots_come(self, count: int | None = None) -> None:
        for _ in range(self._scale.one_shots_a_scene if count is None else count):
            request = self._one_shot_request()
            self._ask(request["hints"]["session"], "one-shots", request)

    def _one_shot_request(self) -> dict[str, Any]:
        self._one_shots += 1
        hints = self._shared() | {"session": f"one-shot-{self._one_shots}"}
        return self._request([*self._system, *self._fresh(self._scale.one_shot_tokens)], hints)

    def _shared(self) -> dict[str, Any]:
        """What an engine's prefix tree would say of the system prompt."""
        sharers = self._scale.agents + self._scale.one_shots_a_scene
        return {"shared_tokens": self._scale.system_tokens, "sharers": sharers}

    def _request(self, prompt: list[int], hints: dict[str, Any]) -> dict[str, Any]:
        return {"do": "generate", "prompt": prompt, "count": self._scale.reply_tokens, "hints": hints}

    def _ask(self, name: str, kind: str, request: dict[str, Any]) -> list[int]:
        self._say(f"{self._scene}: {name}, a prompt of {len(request['prompt'])} tokens")
        answer = self._engine.ask(request)
        tokens: list[int] = answer.pop("tokens")
        self._records.append(Record(scene=self._scene, kind=kind, name=name, **answer))
        return tokens

    def _control(self) -> bool:
        """Whether an agent's next reply is another one when its KV is zeroed."""
        prompt = [*self._agents[0].tokens, *self._fresh(self._scale.step_tokens)]
        reply = self._engine.ask(self._request(prompt, {}))
        zeroed = self._engine.ask({"do": "zeroed", "prompt": prompt, "count": self._scale.reply_tokens})
        return bool(reply["identical"] and zeroed["restored_tokens"] > 0 and reply["tokens"] != zeroed["tokens"])

    def _measure(self) -> Figures:
        """Restores of an agent's own blocks, all on SSD, and of the system prompt's, in memory; then the disk alone."""
        shared_blocks = self._scale.system_tokens // self._scale.block_tokens
        request = {"do": "measure", "times": RESTORE_ROUNDS}
        ssd = self._engine.ask(request | {"prompt": self._agents[0].tokens, "first_block": shared_blocks})
        memory = self._engine.ask(request | {"prompt": self._system, "first_block": 0})
        size_bytes = ssd["bytes_by_medium"]["ssd"]
        raw: dict[str, float] = {}
        with contextlib.suppress(OSError):  # no O_DIRECT here: nothing to compare with
            for setting, rate in raw_read_rates(self._daemon.ssd_path.parent, size_bytes, RAW_ROUNDS):
                raw[setting] = max(rate, raw.get(setting, 0.0))
        best = max(raw, key=raw.__getitem__, default="")
        return Figures(
            ssd_bytes=size_bytes,
            ssd_commands=ssd["commands"],
            ssd_bytes_per_s=size_bytes / min(ssd["seconds"]),
            raw_bytes_per_s=raw.get(best, 0.0),
            raw_setting=best,
            memory_bytes_per_s=memory["bytes_by_medium"]["memory"] / min(memory["seconds"]),
        )


def run_demo(scale: Scale, parent: Path | None, say: Say) -> Outcome:
    """All scenes, in a directory of their own that is gone afterwards. Raises: DemoFailed."""
    with (
        tempfile.TemporaryDirectory(prefix="flatcake-demo-", dir=parent) as directory,
        contextlib.closing(Story(scale, Path(directory), say)) as story,
    ):
        return story.tell()


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""

    def tell(directory: Path | None, say: Say) -> Told:
        scale = Scale()
        outcome = run_demo(scale, directory, say)
        return Told(outcome.proved, document(outcome, asdict(scale)), partial(show, outcome))

    return command(
        arguments,
        program="flatcake demo",
        description="Agents, chats and kill -9, on one node.",
        needs={"torch": "transformers", "transformers": "transformers"},
        tell=tell,
    )


if __name__ == "__main__":
    sys.exit(main())

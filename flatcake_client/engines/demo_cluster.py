"""The cluster's demo: two conversations that move between three nodes, one of which is killed.

    python -m flatcake_client.engines.demo_cluster [--json] [--directory DIR]

    begins at node 1   an agent and a chat; what a node stores is its own
    moves to node 2    which has nothing, and brings it from node 1's memory and SSD
    stays at node 2    all is here by now: what was brought was stored with the turn, as everything that is written
    moves to node 3
    back at node 1     which has the beginning; the rest comes from node 3
    node 1 is killed   kill -9. Only what nobody else has seen by then is computed again: its last turns
    node 1 is back     on its directory; its memory is empty, others have what it misses

Each node has a daemon and an engine, a process each, on loopback; the directory is a real redis-server. Before a conversation
moves, the demo waits until the last turn has been published, and until a death has been noticed: what a lookup does in these
moments (a miss, in time) is in tests/e2e. Each reply is compared with what the model says without any cache (demo_engine.py).
Exit code 0: all tokens are identical, and nothing was computed again that a living node had; 1: not so; 3: the demo cannot run here.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from flatcake_client.engines.demo_cluster_report import ClusterOutcome, MovingRecord, document, show
from flatcake_client.engines.demo_command import Say, Told, command
from flatcake_client.engines.demo_processes import DaemonProcess, DemoFailed, EngineProcess, RedisProcess, undisturbed
from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_describe import describe_ucx

NODES: Final = (1, 2, 3)


class Engine(Protocol):
    """An `EngineProcess`, or what a test has in its place."""

    def start(self) -> None: ...
    def wait_ready(self) -> None: ...
    def ask(self, request: dict[str, Any]) -> dict[str, Any]: ...
    def kill(self) -> None: ...


MakeEngine = Callable[[Path, str, dict[str, Any]], Engine]


@dataclass(frozen=True, slots=True)
class ClusterScale:
    """How large the demo is. The directory knows every 16th block of a chain, so a turn is longer than that here."""

    shape: dict[str, Any] = field(
        default_factory=lambda: {
            "family": "qwen3", "layers": 8, "hidden": 384, "intermediate": 768, "heads": 8, "kv_heads": 4,
            "head_dim": 128, "digit_base": 8, "reach_tokens": 1600,
        }
    )  # fmt: skip
    dtype: str = "bfloat16"
    block_tokens: int = 16
    system_tokens: int = 512
    task_tokens: int = 512
    step_tokens: int = 300
    message_tokens: int = 280
    reply_tokens: int = 8
    agent_context_tokens: int = 1400  # a chat stays below it, an agent does not
    short_reply_tokens: int = 64
    memory_bytes: int = 128 << 20
    ssd_bytes: int = 1 << 30
    # A busy machine is no dead peer: half of it is what a lookup spends at other nodes.
    timeout_s: float = 10.0

    @property
    def vocab(self) -> int:
        return int(self.shape["digit_base"] ** self.shape["kv_heads"])

    @property
    def setup(self) -> dict[str, Any]:
        names = ("shape", "dtype", "block_tokens", "timeout_s")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class Conversation:
    """`held`: how many of its tokens each living node has stored; `ever`: any node, at any time."""

    name: str
    step_tokens: int
    shared_tokens: int
    tokens: list[int]
    previous_reply_tokens: int | None = None
    held: dict[int, int] = field(default_factory=dict)
    ever: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    number: int
    daemon: DaemonProcess
    engine: Engine


class MovingStory:
    """The scenes, in order. Owns all processes."""

    def __init__(self, scale: ClusterScale, directory: Path, say: Say, engine: MakeEngine) -> None:
        """Raises: DemoFailed: no redis-server, no UCX."""
        self._scale, self._say, self._engine = scale, say, engine
        try:
            describe_ucx()
        except Unavailable as error:
            raise DemoFailed(f"nodes read each other's memory through UCX: {error}") from error
        self._redis = RedisProcess(directory)
        self._nodes = {number: self._node(directory, number) for number in NODES}
        self._random = np.random.default_rng(11)
        system, task = self._fresh(scale.system_tokens), self._fresh(scale.task_tokens)
        self._agent = Conversation("agent", scale.step_tokens, scale.system_tokens, [*system, *task])
        self._chat = Conversation("chat", scale.message_tokens, 0, [])
        self._scene = ""
        self._records: list[MovingRecord] = []

    def _node(self, directory: Path, number: int) -> Node:
        scale, home = self._scale, directory / f"node{number}"
        home.mkdir()
        daemon = DaemonProcess(
            home,
            *("--memory-bytes", str(scale.memory_bytes), "--ssd-bytes", str(scale.ssd_bytes)),
            *("--agent-context-tokens", str(scale.agent_context_tokens)),
            *("--short-reply-tokens", str(scale.short_reply_tokens)),
            *("--node-id", str(number), "--directory", "redis", "--redis-url", self._redis.url),
            *("--ucx-listen", "127.0.0.1:0", "--node-ttl", "5s", "--peer-timeout", f"{scale.timeout_s:g}s"),
            in_cluster=True,
        )
        return Node(number, daemon, self._engine(home, daemon.endpoint, scale.setup))

    def tell(self) -> ClusterOutcome:
        """Raises: DemoFailed: something other than tokens is wrong."""
        started_s = time.perf_counter()
        agent, chat = self._agent, self._chat
        self._say("starting a redis-server, and three nodes with an engine each")
        self._start()
        self._scene = "begins at node 1"
        self._turns(1, agent, chat, chat)
        self._scene = "moves to node 2"
        self._turns(2, agent, chat)
        self._scene = "stays at node 2"
        self._turns(2, agent, chat)
        self._scene = "moves to node 3"
        self._turns(3, agent, chat)
        self._scene = "back at node 1"
        self._turns(1, agent, chat)

        self._scene = "node 1 is killed"
        self._say("kill -9 of node 1")
        self._nodes[1].daemon.kill()
        for talk in (agent, chat):
            talk.held.pop(1)
        self._linked((2, 3))
        self._turns(2, agent)
        self._turns(3, chat)

        self._scene = "node 1 is back"
        self._say("node 1 starts again on the same directory")
        self._nodes[1].daemon.start()
        self._nodes[1].daemon.wait_ready()
        self._linked(NODES)
        self._turns(1, agent, chat)

        self._say("checking that every byte is accounted for, on every node")
        return ClusterOutcome(
            records=self._records,
            engine=self._nodes[1].engine.ask({"do": "stats"}),
            law_holds=all(node.daemon.check() for node in self._nodes.values()),
            seconds=time.perf_counter() - started_s,
        )

    def close(self) -> None:
        with undisturbed():
            for node in self._nodes.values():
                node.engine.kill()
                node.daemon.kill()
            self._redis.kill()

    def _start(self) -> None:
        self._redis.start()
        self._redis.wait_ready()
        for node in self._nodes.values():
            node.daemon.start()
            node.engine.start()
        for node in self._nodes.values():
            node.daemon.wait_ready()
            node.engine.wait_ready()
        self._linked(NODES)

    def _linked(self, numbers: Sequence[int]) -> None:
        """Wait until these nodes are linked to each other, and to no other."""
        others = len(numbers) - 1
        for number in numbers:
            self._nodes[number].daemon.wait(
                lambda status: (
                    status["cluster"]["state"] == "joined"
                    and status["cluster"]["links"] == status["cluster"]["attached"] == others
                    and not status["cluster"]["anchors_pending"]
                ),
                f"linked to {others} others",
            )

    def _turns(self, number: int, *talks: Conversation) -> None:
        for talk in talks:
            self._turn(self._nodes[number], talk)
        self._nodes[number].daemon.wait(lambda status: not status["cluster"]["anchors_pending"], "all is published")

    def _turn(self, node: Node, talk: Conversation) -> None:
        prompt = [*talk.tokens, *self._fresh(talk.step_tokens)]
        self._say(f"{self._scene}: {talk.name}, a prompt of {len(prompt)} tokens")
        hints = {
            "session": talk.name,
            "previous_reply_tokens": talk.previous_reply_tokens,
            "shared_tokens": talk.shared_tokens,
            "sharers": 2,
        }
        request = {"do": "generate", "prompt": prompt, "count": self._scale.reply_tokens, "hints": hints}
        answer = node.engine.ask(request)
        reply: list[int] = answer.pop("tokens")
        usable = self._blocks(len(prompt) - 1)  # the last token of a prompt is always computed
        record = MovingRecord(
            scene=self._scene,
            name=talk.name,
            node=node.number,
            known_tokens=min(talk.ever, usable),
            living_tokens=min(max(talk.held.values(), default=0), usable),
            **answer,
        )
        self._records.append(record)
        talk.tokens, talk.previous_reply_tokens = [*prompt, *reply], len(reply)
        talk.ever = talk.held[node.number] = self._blocks(len(talk.tokens) - 1)  # nor was a reply's last one fed

    def _blocks(self, tokens: int) -> int:
        """Tokens of the full blocks."""
        return tokens // self._scale.block_tokens * self._scale.block_tokens

    def _fresh(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._scale.vocab, count)]


def run_cluster_demo(
    scale: ClusterScale, parent: Path | None, say: Say, engine: MakeEngine = EngineProcess
) -> ClusterOutcome:
    """All scenes, in a directory of their own that is gone afterwards. Raises: DemoFailed."""
    with (
        tempfile.TemporaryDirectory(prefix="flatcake-demo-", dir=parent) as directory,
        contextlib.closing(MovingStory(scale, Path(directory), say, engine)) as story,
    ):
        return story.tell()


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""

    def tell(directory: Path | None, say: Say) -> Told:
        scale = ClusterScale()
        outcome = run_cluster_demo(scale, directory, say)
        return Told(outcome.proved, document(outcome, asdict(scale)), partial(show, outcome))

    return command(
        arguments,
        program="flatcake demo --cluster",
        description="An agent and a chat that move between three nodes, and kill -9 of one.",
        needs={"torch": "transformers", "transformers": "transformers", "redis": "cluster"},
        tell=tell,
    )


if __name__ == "__main__":
    sys.exit(main())

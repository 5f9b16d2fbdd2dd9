"""A real cluster for the tests."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from producer.keys import Keys
from tests.servers import Server, free_port
from tests.workers import eventually

PRIMARIES = 3
NODE_TIMEOUT_MS = 1000
TLS_FILES = {"ca_cert": "ca.crt", "cert": "redis.crt", "key": "redis.key"}
BOUNDS = [REDIS_CLUSTER_HASH_SLOTS * i // PRIMARIES for i in range(PRIMARIES + 1)]


def slot_of(queue: str) -> int:
    return key_slot(Keys(queue).prefix.encode())


class Cluster:
    """Three primaries that share the slots evenly, each with ``replicas`` replicas; a context manager like `Server`.

    Args:
        certificates: a folder of `make_certificates`: nodes speak TLS among themselves, and clients have to, with a certificate.
    """

    def __init__(self, kind: str = "valkey", *, replicas: int = 0, certificates: Path | None = None, **config: str) -> None:
        self._stack = ExitStack()
        self._kind = kind
        self._replicas = replicas
        self._certificates = certificates
        self._config = {"cluster_enabled": "yes", "cluster_node_timeout": str(NODE_TIMEOUT_MS), "appendonly": "yes", **config}
        self.servers: list[Server] = []
        self._clients: list[redis.Redis] = []
        self._tls_ports: list[int] = []

    @property
    def url(self) -> str:
        """Names one node; the others have to be found."""
        return f"redis+cluster://127.0.0.1:{self.servers[0].port}"

    @property
    def tls_url(self) -> str:
        """The same with TLS, the authority and a client's certificate."""
        folder, port = self._certificates, self._tls_ports[0]
        return (
            f"rediss+cluster://127.0.0.1:{port}?ssl_ca_certs={folder}/ca.crt&ssl_certfile={folder}/redis.crt&ssl_keyfile={folder}/redis.key"
        )

    @property
    def url_of_all(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def queue_on(self, primary: int) -> str:
        """A name of a queue that this primary served when the cluster was new."""
        return next(name for name in (f"q{i}" for i in range(1000)) if BOUNDS[primary] <= slot_of(name) < BOUNDS[primary + 1])

    def client(self, node: int) -> redis.Redis:
        """Closed with the cluster."""
        return self._clients[node]

    def id_of(self, node: int) -> str:
        return str(self.client(node).execute_command("CLUSTER", "MYID").decode())

    def migrate(self, queue: str, source: int, target: int) -> None:
        """Move a queue's slot between primaries, as an operator's tools do: key by key."""
        slot = slot_of(queue)
        self.client(target).execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.client(source).execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        while keys := self.client(source).execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            port = self.servers[target].port
            self.client(source).execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source):
            self.client(node).execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))

    def migrate_at_once(self, queue: str, source: int, target: int) -> None:
        """The same in one step, as Valkey 9 can."""
        slot = slot_of(queue)
        self.client(source).execute_command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.id_of(target))
        eventually(lambda: self._serves(target, slot), "the slot has moved")

    def _serves(self, node: int, slot: int) -> bool:
        ranges = self.client(node).execute_command("CLUSTER", "SLOTS")
        return any(first <= slot <= last and primary[2].decode() == self.id_of(node) for first, last, primary, *_ in ranges)

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            for _ in range(PRIMARIES * (1 + self._replicas)):
                self._add(stack)
            self._assign()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _add(self, stack: ExitStack) -> None:
        self._config["cluster_port"] = str(free_port())
        server = stack.enter_context(Server(self._kind, **self._config, **self._tls()))
        client = stack.enter_context(server.client(password=self._config.get("requirepass")))
        if self.servers:
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port, self._first_bus_port)
        else:
            self._first_bus_port = self._config["cluster_port"]
        self.servers.append(server)
        self._clients.append(client)

    def _tls(self) -> dict[str, str]:
        """Settings of the next node, whose plain port remains for the tests' own checks."""
        if self._certificates is None:
            return {}
        self._tls_ports.append(free_port())
        files = {f"tls_{name}_file": f"{self._certificates}/{file}" for name, file in TLS_FILES.items()}
        return {"tls_port": str(self._tls_ports[-1]), "tls_cluster": "yes", "tls_replication": "yes", **files}

    def _assign(self) -> None:
        for node in range(PRIMARIES):
            self.client(node).execute_command("CLUSTER", "ADDSLOTSRANGE", BOUNDS[node], BOUNDS[node + 1] - 1)
        for node, client in enumerate(self._clients):
            eventually(lambda client=client: self._knows_all(client), f"node {node} knows the others")
        for replica in range(PRIMARIES, len(self.servers)):
            self.client(replica).execute_command("CLUSTER", "REPLICATE", self.id_of(replica % PRIMARIES))
        for node, client in enumerate(self._clients):
            eventually(lambda client=client: self._is_ready(client), f"node {node} is ready")

    def _knows_all(self, client: redis.Redis) -> bool:
        info = client.execute_command("CLUSTER", "INFO")
        return bool(f"cluster_known_nodes:{len(self.servers)}".encode() in info and b"cluster_state:ok" in info)

    def _is_ready(self, client: redis.Redis) -> bool:
        linked = client.info("replication").get("master_link_status", "up") == "up"
        seen = sum(len(nodes) for _, _, *nodes in client.execute_command("CLUSTER", "SLOTS"))
        return bool(linked and seen == len(self.servers))

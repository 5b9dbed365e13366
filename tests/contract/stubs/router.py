"""A router by turns: `router.py --listen ADDRESS --dial SCHEDULER --dial SCHEDULER`."""

from link import Message, Node, options


class Router:
    """Remembers where each unfinished request went."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.turn = 0
        self.where: dict[bytes, str] = {}
        self.kept: dict[bytes, Message] = {}  # not accepted yet
        self.waiting: list[Message] = []

    def ready(self) -> list[str]:
        """Schedulers that say so, the least loaded first, by turns among equals."""
        names: list[tuple[int, str]] = []
        for name, link in self.node.links.items():
            replicas = link.stats[2] if link.address and link.stats and len(link.stats) > 2 else []
            if any(r[1] and not (r[19:] and r[19]) for r in replicas):
                names.append((sum(at == name for at in self.where.values()), name))
        self.turn += 1
        least = min(names, default=(0, ""))[0]
        equals = sorted(name for load, name in names if load == least)
        return equals[self.turn % len(equals) :] + equals if equals else []

    def place(self, message: Message) -> None:
        rid = message[1]
        self.where.pop(rid, None)
        names = self.ready()
        if not names:
            self.waiting.append(message)
            return
        self.where[rid], self.kept[rid] = names[0], message
        self.node.send(names[0], *message)

    def on_message(self, peer: str, message: Message) -> None:
        match message:
            case ["Generate", bytes() as rid, int() as attempt, *_]:
                old = self.kept.get(rid)
                if old is not None and old[2] == attempt and self.where.get(rid) in self.node.links:
                    self.node.send(self.where[rid], *message)
                else:
                    self.place(message)
            case ["Ack", list() as rows]:
                for row in rows:
                    if isinstance(row, list) and row and isinstance(row[0], bytes):
                        self.kept.pop(row[0], None)
                        if row[2:] == [True]:
                            self.where.pop(row[0], None)
            case _:
                pass

    def on_down(self, name: str) -> None:
        for rid in [rid for rid, at in self.where.items() if at == name]:
            del self.where[rid]
            if rid in self.kept:
                self.place(self.kept.pop(rid))

    def on_idle(self) -> None:
        if self.waiting and self.ready():
            waiting, self.waiting = self.waiting, []
            for message in waiting:
                self.place(message)


if __name__ == "__main__":
    given = options()
    node = Node("router", "router-0")
    node.listen(given["listen"][0])
    for address in given["dial"]:
        node.dial(address)
    router = Router(node)
    node.run(router.on_message, router.on_down, router.on_idle)

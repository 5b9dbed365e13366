"""The schedulers' side of requests: placing, asking again, aborting, acknowledging."""

from deepmesh.wire.link import Peer
from deepmesh.wire.messages import Abort, AckRow, Attach, Rid, StopAt
from services.tokenizer.actions import Outbox, ToScheduler
from services.tokenizer.placement import Schedulers
from services.tokenizer.request import Phase, Request

RESEND_S = 2.0  # Generate without Accepted, Attach without an answer
QUIET_S = 5.0  # a running request without a word: ask
ATTACH_S = 0.2  # between two Attach of one request


class Upstream:
    """Knows which scheduler has which request, and gets its tokens from there."""

    def __init__(self, me: str, outbox: Outbox, vocabulary: str = "") -> None:
        self.schedulers = Schedulers(vocabulary)
        self.router = ""  # its name while its link is up
        self._me = me
        self._vocabulary = vocabulary
        self._outbox = outbox

    # ------------------------------------------------------------ towards a scheduler

    def place(self, request: Request, now: float) -> bool:
        """Generate, or continue: the router finds a scheduler, without one we choose ourselves.

        False while none is up.
        """
        self._uncount(request)
        if self.router:
            request.phase = Phase.ROUTED
            request.attempt += 1
            request.must_ask = False
            request.scheduler, request.router = "", self.router
            self._generate(request, now)
            return True
        peer = self.schedulers.choose()
        if peer is None:
            request.phase = Phase.UNPLACED
            return False
        self._send(request, peer, now)
        return True

    def place_elsewhere(
        self, request: Request, name: str, position: int, now: float, *, same_weights: bool
    ) -> bool:
        """Scheduler `name` refuses it, or ends it unfinished: continue at another one.

        False when no other one is up that has not refused it, too.

        Args:
            same_weights: its tokens are of another model than that scheduler serves; the router
                does not know of which.
        """
        fingerprint = request.fingerprint if same_weights and request.output else ""
        peer = self.schedulers.choose(request.refused_by, fingerprint)
        if peer is None:
            return False
        self._outbox.ack(name, AckRow(request.rid, position, done=True))
        if self.router and not fingerprint:  # it avoids the replica that it chose last
            return self.place(request, now)
        self._uncount(request)
        self._send(request, peer, now)
        return True

    def leave_stalled(self, requests: list[Request], now: float) -> None:
        """Whose scheduler has had no engine for long continues at one that has. A group that is
        upgraded rank by rank, or whose executor cannot be placed, may take any time."""
        self.schedulers.look(now)
        stalled = self.schedulers.stalled(now)
        for request in requests if stalled else ():
            name = request.scheduler
            if name not in stalled or request.phase not in (Phase.SENT, Phase.RUNNING):
                continue
            peer = self.schedulers.successor(name, request.fingerprint if request.output else "")
            if peer is not None:
                self._outbox.add(ToScheduler(name, Abort(request.rid, request.attempt)))
                self._uncount(request)
                self._send(request, peer, now)

    def ask(self, request: Request, names: set[str], now: float) -> bool:
        """Ask schedulers whether they hold it already; False while none of them is up."""
        self._uncount(request)
        request.asked = names & self.schedulers.names
        request.phase = Phase.ASKED if request.asked else Phase.UNPLACED
        self._attach(request, now)
        return bool(request.asked)

    def place_or_ask(self, request: Request, now: float) -> bool:
        """A scheduler may hold it from before a link or a process was lost: then ask first."""
        if request.must_ask:
            return self.ask(request, self.schedulers.names, now)
        peer = self.schedulers.get(request.scheduler)
        if peer is not None and peer.incarnation == request.incarnation and request.attempt:
            return self.ask(request, {peer.name}, now)
        return self.place(request, now)

    def attach(self, request: Request, now: float) -> None:
        """Tokens are missing: have them sent again from our position on."""
        if now - request.attached_at >= ATTACH_S:
            self._attach(request, now)

    def stop(self, request: Request) -> None:
        """A stop string ended it here; the scheduler's own end will follow."""
        if request.phase is Phase.RUNNING:
            message = StopAt(request.rid, request.position)
            self._outbox.add(ToScheduler(request.scheduler, message))

    def abort(self, request: Request) -> None:
        """Nobody wants its tokens any more."""
        for name in sorted(self._holders(request) & self.schedulers.names):
            self._outbox.add(ToScheduler(name, Abort(request.rid, request.attempt)))
        self.release(request)

    def abort_everywhere(self, rid: Rid) -> None:
        """A request that we do not know: whoever has it stops."""
        for name in sorted(self.schedulers.names):
            self._outbox.add(ToScheduler(name, Abort(rid)))

    def ack(self, request: Request) -> None:
        """Tell how far the client has read, if that has moved."""
        position = request.newly_acked()
        if position is not None and request.phase is Phase.RUNNING:
            self._outbox.ack(request.scheduler, AckRow(request.rid, position))

    def done(self, request: Request, name: str, position: int) -> None:
        """Its terminal message has arrived: the scheduler may forget it."""
        self._outbox.ack(name, AckRow(request.rid, position, done=True))
        self.release(request)

    # ------------------------------------------------------------ from a scheduler

    def adopt(self, request: Request, name: str) -> bool:
        """Whether this scheduler has the request; the first that answers an Attach does."""
        if request.phase is Phase.ASKED and name in request.asked:
            peer = self.schedulers.get(name)
            if peer is None:
                return False
            request.asked = set()
            request.must_ask = False
            request.attempt = max(request.attempt, 1)
            self._join(request, peer)
            request.phase = Phase.RUNNING
            return True
        if request.phase is Phase.ROUTED:
            peer = self.schedulers.get(name)
            if peer is None:
                return False
            self._join(request, peer)
            request.phase = Phase.RUNNING
            self._outbox.ack(request.router, AckRow(request.rid, request.position))
            return True
        if request.scheduler != name or request.phase not in (Phase.SENT, Phase.RUNNING):
            return False
        request.phase = Phase.RUNNING
        return True

    def reject(self, request: Request, name: str) -> None:
        """A second scheduler runs it, too: it was sent again while its first answer was away."""
        if request.phase is Phase.RUNNING and request.scheduler != name:
            self._outbox.add(ToScheduler(name, Abort(request.rid, request.attempt)))

    def unknown(self, request: Request, name: str, now: float) -> None:
        """The answer to an Attach: this scheduler does not hold it."""
        if request.phase is Phase.ASKED:
            request.asked.discard(name)
            if not request.asked:
                self.place(request, now)
        elif request.phase is Phase.RUNNING and request.scheduler == name:
            self.place(request, now)

    def down(self, name: str, requests: list[Request]) -> list[Request]:
        """A scheduler is lost; returns its requests, which are without one now."""
        self.schedulers.down(name)
        lost: list[Request] = []
        for request in requests:
            if request.phase is Phase.ASKED:
                request.asked.discard(name)
                if request.asked:
                    continue
            elif request.scheduler != name or request.phase not in (Phase.SENT, Phase.RUNNING):
                continue
            self._uncount(request)
            request.phase = Phase.UNPLACED
            lost.append(request)
        return lost

    def router_down(self, requests: list[Request]) -> list[Request]:
        """The router is lost; returns the requests that may not have left it."""
        self.router = ""
        lost: list[Request] = []
        for request in requests:
            request.router = ""
            if request.phase is Phase.ROUTED:
                request.phase = Phase.UNPLACED
                request.must_ask = True  # or they have left it, and an answer is on its way
                lost.append(request)
        return lost

    def remind(self, request: Request, now: float) -> None:
        """Time alone: repeat what was not answered; every message upstream is idempotent."""
        silent_s = now - request.spoke_at
        match request.phase:
            case Phase.UNPLACED:
                self.place_or_ask(request, now)
            case Phase.SENT | Phase.ROUTED if silent_s >= RESEND_S:
                # Attach, too: it may run there under a later attempt of an earlier instance of us
                self._generate(request, now)
                self._attach(request, now)
            case Phase.ASKED if silent_s >= RESEND_S:
                self._attach(request, now)
            case Phase.RUNNING if silent_s >= QUIET_S:
                self._attach(request, now)
            case _:
                pass

    # ------------------------------------------------------------ inside

    def _send(self, request: Request, peer: Peer, now: float) -> None:
        request.phase = Phase.SENT
        request.attempt += 1
        request.must_ask = False
        self._join(request, peer)
        self._generate(request, now)

    def _generate(self, request: Request, now: float) -> None:
        request.spoke_at = now
        to = request.router if request.phase is Phase.ROUTED else request.scheduler
        self._outbox.add(ToScheduler(to, request.generate(self._me, self._vocabulary)))

    def _attach(self, request: Request, now: float) -> None:
        request.spoke_at = request.attached_at = now
        message = Attach(request.rid, request.attempt, self._me, request.position)
        for name in sorted(self._holders(request)):
            self._outbox.add(ToScheduler(name, message))

    def _holders(self, request: Request) -> set[str]:
        """Schedulers that may have it."""
        match request.phase:
            case Phase.ASKED:
                return request.asked
            case Phase.ROUTED:
                return self.schedulers.names
            case _:
                return {request.scheduler}

    def _join(self, request: Request, peer: Peer) -> None:
        request.scheduler, request.incarnation = peer.name, peer.incarnation
        request.counted_at = peer.name
        self.schedulers.placed[peer.name] += 1

    def release(self, request: Request) -> None:
        """It is over, here: it no longer counts as load."""
        self._uncount(request)
        if request.router:
            self._outbox.ack(request.router, AckRow(request.rid, request.position, done=True))
            request.router = ""

    def _uncount(self, request: Request) -> None:
        if request.counted_at:
            self.schedulers.placed[request.counted_at] -= 1
            request.counted_at = ""

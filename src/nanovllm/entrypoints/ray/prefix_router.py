"""How Ray Serve sends requests to replicas: by `PrefixTable`. This file imports Ray."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanovllm.entrypoints.ray.routing import BOUND, PrefixTable


class PrefixRouter(RequestRouter):
    """A request router of Ray Serve. The calls that it routes have the arguments `keys` and `avoid` of `PrefixTable.ranked`.

    References:
        https://docs.ray.io/en/latest/serve/advanced-guides/custom-request-router.html
    """

    def initialize_state(self, bound: float = BOUND) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin with an empty table. Ray Serve calls this with the `request_router_kwargs` of the deployment."""
        self._table = PrefixTable(bound)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, one by one, as a request prefers them. Ray Serve takes the first that has room."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # before it is asked again, if none has room
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._table.ranked(_asked(pending_request, "keys"), [*names], _asked(pending_request, "avoid"))
        # Noted before it is sent, so that the next request finds it, and corrected in `on_request_routed`.
        request = pending_request.metadata.internal_request_id
        self._table.begin(request, _asked(pending_request, "keys"), ranked[0])
        pending_request.future.add_done_callback(lambda done: self._table.end(request) if done.cancelled() else None)
        return [[names[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken a request."""
        request = pending_request.metadata.internal_request_id
        if self._table.runs(request):  # otherwise it has ended already
            self._table.begin(request, _asked(pending_request, "keys"), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request has ended, or its replica was lost."""
        self._table.end(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Other replicas are there."""
        super().update_replicas(replicas)
        self._table.keep([replica.replica_id.unique_id for replica in replicas])


def _asked(request: PendingRequest, name: str) -> Sequence[Any]:
    return request.kwargs.get(name, ())

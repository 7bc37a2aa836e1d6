"""The application for Ray Serve: replicas with an engine each, and before them an ingress that finds the right one and asks another."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanovllm.entrypoints.cli.serve import api_keys, require_server
from nanovllm.entrypoints.ray.require import gpus_of, require_ray
from nanovllm.entrypoints.ray.routing import BOUND, PrefixTable
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.errors import InvalidRequestError

ROUTER = "nanovllm.entrypoints.ray.prefix_router:PrefixRouter"
MAX_NUM_SEQS = 256  # the default of `LLM`
HEALTH_SECONDS = 5.0  # for a replica to say that it is well


def build_app(
    model: str = "tiny",
    *,
    num_replicas: int = 1,
    num_gpus: float | None = None,
    num_ingresses: int = 1,
    bound: float = BOUND,
    settings: Settings | None = None,
    deployment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An application for `ray.serve.run`: OpenAI's routes, answered by several replicas of an engine.

    A request goes to a replica that has the longest prefix of its prompt, unless this replica runs more than its share. If a replica dies,
    the requests of which nothing was sent run on another one, running streams end with an error event, and Ray starts a new replica.

    Args:
        model: As in `LLM`. Every machine needs it under this name: a repository, or a folder that all of them see.
        num_replicas: How many engines there are.
        num_gpus: The GPUs of one replica. None: as many as `tensor_parallel_size` says, or one; none with `device="cpu"`.
        num_ingresses: How many processes answer HTTP. Each has a table of prefixes of its own.
        bound: How many requests a replica may run, in relation to the mean of all, before the next ones go elsewhere.
        settings: A `Settings` of the server, with keys, hosts and limits. None: the defaults, with the name of the model, and with the key
            in the variable `NANOVLLM_API_KEY` if there is one.
        deployment: Further options of `ray.serve.deployment` for the replicas, such as `autoscaling_config` or `ray_actor_options`.
        **options: The options of `LLM`, such as `tensor_parallel_size`, `num_pages` or `quantization`.

    Returns:
        An `Application` of Ray Serve.

    Raises:
        InvalidRequestError: Ray or the extra `server` is not installed, or an argument is invalid.

    References:
        https://docs.ray.io/en/latest/serve/index.html

    Examples:
        >>> type(build_app("tiny", num_replicas=2, device="cpu", num_pages=256)).__name__
        'Application'
    """
    require_ray("aiohttp")
    require_server()
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    PrefixTable(bound)  # raises for a bound that makes no sense
    settings = Settings(model_name=Path(model).name, api_keys=api_keys(None)) if settings is None else settings
    if not isinstance(settings, Settings):
        raise InvalidRequestError(f"settings must be a Settings of the server or None, not {type(settings).__name__}")
    given = dict(deployment or {})
    actor = {"num_gpus": gpus_of(options, num_gpus), **given.pop("ray_actor_options", {})}
    size = {} if "autoscaling_config" in given else {"num_replicas": num_replicas}
    seqs = options.get("max_num_seqs") or MAX_NUM_SEQS
    waits: dict[str, Any] = {"max_ongoing_requests": seqs + max(1, seqs // 4), "health_check_period_s": HEALTH_SECONDS}
    waits["graceful_shutdown_timeout_s"] = settings.shutdown_seconds
    routed: Any = {"request_router_class": ROUTER, "request_router_kwargs": {"bound": bound}}
    how: Any = {"ray_actor_options": actor, **size, **waits, "request_router_config": RequestRouterConfig(**routed), **given}
    replicas: Any = serve.deployment(Replica, **how)
    front: Any = {"num_replicas": num_ingresses, "max_ongoing_requests": 1 << 14, "ray_actor_options": {"num_cpus": 0}}
    ingress: Any = serve.deployment(Ingress, **front)
    return ingress.bind(replicas.bind(model, replace(settings, page=False), options), settings)


def from_config(arguments: Mapping[str, Any]) -> Any:
    """`build_app` for `serve run` and for configuration files, which give arguments as one mapping.

    Args:
        arguments: Those of `build_app`, by name. `settings` is a mapping of the fields of `Settings`, in which `api_key_file` may name a
            file with a key a line.

    Returns:
        An `Application` of Ray Serve.

    Raises:
        InvalidRequestError: As in `build_app`, or a name is unknown.

    References:
        https://docs.ray.io/en/latest/serve/advanced-guides/app-builder-guide.html

    Examples:
        >>> type(from_config({"model": "tiny", "device": "cpu", "settings": {"allowed_hosts": ["chat.example"]}})).__name__
        'Application'
    """
    given = dict(arguments)
    chosen: dict[str, Any] = dict(given.pop("settings", None) or {})
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}
    file = fields.pop("api_key_file", None)
    fields = {"model_name": Path(given.get("model", "tiny")).name, "api_keys": api_keys(None if file is None else Path(file)), **fields}
    try:
        return build_app(**given, settings=Settings(**fields))
    except TypeError as error:
        raise InvalidRequestError(f"the arguments of the application: {error}") from None


class Replica:
    """One engine. Ray Serve makes it in an actor that has the GPUs of the replica.

    Args:
        model: As in `LLM`.
        settings: The `Settings` of the server.
        options: The options of `LLM`.
    """

    _ended: Callable[[], None] | None = None  # until the engine is made

    def __init__(self, model: str, settings: Settings, options: dict[str, Any]) -> None:
        from ray import serve

        from nanovllm.entrypoints.ray.local_server import LocalServer

        self._server = LocalServer(model, settings, options)
        self._ended = self._server.close
        self._name: str = serve.get_replica_context().replica_id.unique_id

    async def answer(self, request: Any, keys: Any = (), avoid: Any = ()) -> AsyncGenerator[Any, None]:
        """Answer an `HttpRequest`: a `Head`, then the bytes of the body. `keys` and `avoid` are for the router alone."""
        from nanovllm.entrypoints.ray.local_server import Head

        async with aclosing(self._server.answer(request)) as pieces:
            async for piece in pieces:
                yield replace(piece, replica=self._name) if isinstance(piece, Head) else piece

    def check_health(self) -> None:
        """Ray Serve calls this again and again, and starts a replica anew whose engine has ended."""
        self._server.require_alive()

    def __del__(self) -> None:
        if self._ended is not None:
            self._ended()


class Ingress:
    """What answers HTTP: it reads a request, and asks replicas for the answer.

    Args:
        replicas: The handle of the deployment of `Replica`.
        settings: The `Settings` of the server.
    """

    def __init__(self, replicas: Any, settings: Settings) -> None:
        self._replicas, self._settings = replicas.options(stream=True), settings

    async def __call__(self, request: Any) -> Any:
        """Answer a request of Starlette."""
        from starlette.responses import Response

        from nanovllm.entrypoints.server.errors import ApiError

        try:
            return await self._answer(request)
        except ApiError as error:
            return Response(error.body(), error.status, dict(error.headers), "application/json")

    async def _answer(self, request: Any) -> Any:
        from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
        from starlette.responses import Response, StreamingResponse

        from nanovllm.entrypoints.ray.failover import lost_error, responses_error, with_failover
        from nanovllm.entrypoints.ray.local_server import Head, HttpRequest
        from nanovllm.entrypoints.ray.shared_routes import fields_of, require_shared
        from nanovllm.entrypoints.server.admission import OPEN
        from nanovllm.entrypoints.server.api.replies import error_event

        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if path in OPEN:  # not asked of a replica, which may be busy
            if await asyncio.to_thread(_num_running):
                return Response(b'{"status":"ok"}', media_type="application/json")
            raise lost_error("no replica runs: they are starting, or have failed")
        body = await request.body()
        fields = fields_of(body)
        require_shared(path, len(body), fields, self._settings.limits)
        asked = HttpRequest(
            method=request.method, path=path, query=request.scope["query_string"], headers=tuple(request.headers.raw), body=body
        )
        keys = self._keys(fields, request)

        async def ask(avoid: tuple[str, ...]) -> AsyncGenerator[Any, None]:
            pieces = self._replicas.answer.remote(asked, keys=keys, avoid=avoid)
            try:
                async for piece in pieces:
                    yield piece
            finally:
                pieces.cancel()

        cut_off = responses_error if path.endswith("/responses") else error_event
        pieces = with_failover(ask, (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError), cut_off=cut_off)
        try:
            async with asyncio.timeout(HEALTH_SECONDS if request.method in ("GET", "HEAD") else None):
                head = await anext(pieces)
        except (TimeoutError, BackPressureError, DeploymentUnavailableError):
            raise lost_error("no replica answers: they are starting, or have failed") from None
        assert isinstance(head, Head)
        response: Response
        if head.streams:
            response = StreamingResponse(pieces, head.status)  # pyright: ignore[reportArgumentType]
        else:
            response = Response(b"".join([piece async for piece in pieces if isinstance(piece, bytes)]), head.status)
        headers = [(name, value) for name, value in head.headers if name != b"x-request-id"]  # Ray Serve adds it
        response.raw_headers = [*headers, (b"x-replica", head.replica.encode())]
        return response

    def _keys(self, fields: dict[str, Any], request: Any) -> tuple[int, ...]:
        from nanovllm.entrypoints.ray.prefixes import request_keys

        key = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
        return request_keys(fields, key.encode())


def _num_running() -> int:
    """How many replicas run, as far as Ray Serve knows. Blocks until it has said so."""
    from ray import serve

    application = serve.status().applications[serve.get_replica_context().app_name]
    states = application.deployments[Replica.__name__].replica_states
    return sum(number for state, number in states.items() if str(getattr(state, "value", state)) == "RUNNING")

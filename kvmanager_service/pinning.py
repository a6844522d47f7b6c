"""Pinning: a `PinPrefixRequest` becomes a pin of the engine.

Station: called by the KvManager servicer; calls `convert`, the text model and the engine. It is to pins what admission
is to requests.
"""

from __future__ import annotations

from kvplane.kvmanager.v1 import kv_manager_service_pb2 as pb

from kvmanager_service.callers import tenant_of_request
from kvmanager_service.convert import check_pin, to_pinned_prefix, token_array
from kvmanager_service.engine_api import Engine, PinView
from kvmanager_service.errors import PreconditionError

__all__ = ["pin_prefix"]


async def pin_prefix(engine: Engine, request: pb.PinPrefixRequest, *, isolate_tenants: bool) -> PinView:
    """Check, tokenise and pin.

    Args:
        engine: which pins it.
        request: as received.
        isolate_tenants: whether requests share blocks only within their tenant.

    Raises:
        CoreError: it was not pinned; see `Engine.pin_prefix`.
    """
    model = engine.model()
    check_pin(request, model)
    request.tenant = tenant_of_request(request.tenant)  # the message is nobody else's
    if request.HasField("token_ids"):
        prefix = token_array(request.token_ids.ids)
    elif model.text is None:
        raise PreconditionError(
            "NO_TOKENIZER",
            "prefix: expected token_ids, since the served model has no tokenizer, got text; tokenise it yourself",
            field="prefix",
        )
    else:
        prefix = await model.text.encode_text(request.text, model.max_model_len)
    lora = engine.adapter(request.adapter) if request.adapter else None
    return engine.pin_prefix(to_pinned_prefix(request, prefix, model, isolate_tenants=isolate_tenants, lora=lora))

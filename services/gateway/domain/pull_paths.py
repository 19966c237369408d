"""The meaning of DELETE for a path below `/admin/v1/models` that ends with "/pull"."""

from __future__ import annotations

from collections.abc import Callable


def removes_model(raw_path: bytes, name: str, is_registered: Callable[[str], bool]) -> bool:
    """Return whether DELETE removes the model `NAME/pull`, and does not cancel pulls of `NAME`.

    1. The slash of "/pull" is written as %2F: it belongs to a name, so the model is removed.
    2. `NAME/pull` is a model, and `NAME` is none: the model is removed, as nothing can be pulled.
    3. Otherwise pulls of `NAME` are cancelled, also where both are models: that loses no model.

    Args:
        raw_path: The path as the client has written it, without a query.
        name: The decoded path between "models/" and "/pull".
        is_registered: Whether a model or alias of this name exists.
    """
    if raw_path.lower().endswith(b"%2fpull"):
        return True
    return is_registered(f"{name}/pull") and not is_registered(name)

"""The router that `moe.router` names."""

from __future__ import annotations

import importlib

from mxjax.moe.router import Router


def router_class(name: str | None) -> type[Router]:
    """The class `name`, written `module:Class`; None: the built-in one.

    Raises:
      ValueError: it is written differently, cannot be imported, or is no router.
    """
    if name is None:
        return Router
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(
            "must be written module:Class, such as examples.cosine_router:CosineRouter"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise ValueError(
            f"{module_name} cannot be imported ({type(error).__name__}: {error}); start in the "
            "folder that holds it, or name that folder in PYTHONPATH"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, Router):
        raise ValueError(
            f"{module_name} has no class {class_name} that extends mxjax.moe.router.Router; name "
            "one that does"
        )
    return found

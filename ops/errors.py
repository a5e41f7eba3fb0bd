"""Errors of ops. Every message has the form "{op}: {argument} must {rule}, got {value}"."""


class OpError(Exception):
    """Base of the errors that an op raises before it runs anything."""


class ShapeError(OpError, ValueError):
    """A size, a number of dimensions or a stride does not fit the contract."""


class DTypeError(OpError, TypeError):
    """An argument is of the wrong type, or a tensor of the wrong dtype or device."""


class RegistryError(OpError, ValueError):
    """An op or an implementation is unknown, refused, or chosen too late."""

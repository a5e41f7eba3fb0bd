"""Errors that a user of the engine can meet. Each says what is wrong and what to do."""


class VllmTritonError(Exception):
    """Base of all errors raised on purpose by the engine."""


class ConfigError(VllmTritonError, ValueError):
    """A setting of the engine is unknown, out of range, or does not fit the model."""


class ModelError(VllmTritonError, ValueError):
    """A model cannot be found, read or run: the message names the file, field or tensor."""


class RequestError(VllmTritonError, ValueError):
    """One request is wrong; the engine and the other requests live on.

    Args:
        message: what is wrong and what to do.
        param: the field that is wrong, in the request's own terms (for example "logit_bias").
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class EngineDeadError(VllmTritonError, RuntimeError):
    """The engine stopped because of an error in a step; every request in flight fails with it."""

"""HTTP errors of the gateway: status, stable code, message and hint.

Each dialect encodes them in its own shape; the admin API as `{"error": {type, message, hint}}`.
"""

from __future__ import annotations

from afield.errors import AfieldError


class ApiError(AfieldError):
    """An error response of the gateway."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str = "",
        *,
        parameter: str | None = None,
        retry_after_s: float | None = None,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        """`parameter` is the invalid one, `sizes` are prompt tokens and context length of an overflow."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.hint = hint
        self.parameter = parameter
        self.retry_after_s = retry_after_s
        self.sizes = sizes

    @property
    def text(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


def bad_request(message: str, hint: str = "", *, parameter: str | None = None) -> ApiError:
    return ApiError(400, "invalid_request_error", message, hint, parameter=parameter)


def unauthorized(
    message: str = "the API key is missing or wrong", hint: str = "use the key of this session"
) -> ApiError:
    return ApiError(401, "invalid_api_key", message, hint)


def forbidden(message: str, hint: str = "") -> ApiError:
    return ApiError(403, "forbidden", message, hint)


def not_found(message: str, hint: str = "") -> ApiError:
    return ApiError(404, "not_found", message, hint)


def conflict(message: str, hint: str = "") -> ApiError:
    return ApiError(409, "conflict", message, hint)


def budget_exhausted(message: str) -> ApiError:
    return ApiError(400, "budget_exhausted", message, "the session takes no more model calls")


def context_exceeded(prompt: int, limit: int) -> ApiError:
    return ApiError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {limit} tokens; the request has {prompt} in its messages",
        "shorten the conversation",
        sizes=(prompt, limit),
    )


def engine_down(message: str) -> ApiError:
    return ApiError(503, "engine_unavailable", message, "try again")

"""Service errors with the codes that AWS clients turn into typed exceptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Kind = Literal[
    "ValidationException",
    "UnauthorizedException",
    "ServiceQuotaExceededException",
    "AccessDeniedException",
    "ResourceNotFoundException",
    "ConflictException",
    "RetryableConflictException",
    "RuntimeClientError",
    "ThrottlingException",
    "InternalServerException",
]
STATUS: dict[Kind, int] = {
    "ValidationException": 400,
    "UnauthorizedException": 401,
    "ServiceQuotaExceededException": 402,
    "AccessDeniedException": 403,
    "ResourceNotFoundException": 404,
    "ConflictException": 409,
    "RetryableConflictException": 409,
    "RuntimeClientError": 424,
    "ThrottlingException": 429,
    "InternalServerException": 500,
}


class ServiceError(Exception):
    """Error response of the service.

    `fields` lists (name, message) of each invalid field of a ValidationException.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        fields: Sequence[tuple[str, str]] = (),
        reason: str = "FieldValidationFailed",
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self._fields, self._reason = fields, reason

    @property
    def status(self) -> int:
        return STATUS[self.kind]

    def body(self) -> dict[str, object]:
        body: dict[str, object] = {"message": str(self)}
        if self.kind == "ValidationException":
            body["reason"] = self._reason
            body["fieldList"] = [{"name": name, "message": message} for name, message in self._fields]
        return body


def invalid(field: str, message: str) -> ServiceError:
    return ServiceError("ValidationException", f"{field}: {message}", fields=[(field, message)])


def not_found(what: str) -> ServiceError:
    return ServiceError("ResourceNotFoundException", f"{what} was not found")


class ConnectionCut(Exception):
    """Breaks the client's connection instead of answering, as a network failure would."""

"""Errors typed by whose fault they are. Each carries a stable code that clients can act on."""


class SttError(Exception):
    """Base of every error that Hark reports to a client.

    ``code`` is a stable snake_case identifier; ``message`` is one sentence for a person. The shell turns
    the type into an HTTP status, a WebSocket close code or a data-channel message in one place.
    """

    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class ClientError(SttError):
    """The client sent something that it can correct. Sending the same again gives the same error."""

    code = "bad_request"


class BadMessage(ClientError):
    """A control message, parameter or frame that the protocol does not allow."""

    code = "bad_message"


class BadAudio(ClientError):
    """Audio that cannot be what it is declared to be, or cannot be decoded."""

    code = "bad_audio"


class ServerError(SttError):
    """The service could not do what was rightly asked."""


class RecognizerFailed(ServerError):
    """The engine gave no answer for a request, after every retry."""

    code = "recognizer_failed"


class Overloaded(ServerError):
    """No capacity now. ``retry_after_s`` (seconds) says when another try may succeed."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 5.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s

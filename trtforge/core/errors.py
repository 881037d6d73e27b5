"""The one error that a user can cause. Everything else that escapes is a defect of trtforge."""


class ForgeError(Exception):
    """A failure with a remedy: `message` says what is wrong (and names the file or key), `hint` what to do."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


class UsageError(ForgeError):
    """The command line itself is wrong: exit status 2."""


class RequestError(ForgeError):
    """A generation request that this engine cannot serve. It ends that request and disturbs no other."""


def _rebuild(cls: type[ForgeError], message: str, hint: str) -> ForgeError:
    return cls(message, hint=hint)

"""Explain the failure of another program from its log, as `trtforge doctor --log` does."""

from trtforge.core.errors import ForgeError, LoggedError


def explained(error: LoggedError) -> ForgeError:
    """The failure with the first real error of its log; unchanged if the log is unreadable or has no error."""
    from trtforge.doctor.log import diagnose
    from trtforge.doctor.log_lines import numbered_pieces

    try:
        with error.log.open("rb") as stream:
            diagnosis = diagnose(numbered_pieces(stream))
    except OSError:
        return error
    if diagnosis.first is not None:
        first = diagnosis.first
        said = "\n".join(f"  {seen.text}" for seen in first.lines)
        return ForgeError(
            f"{error.message}: {first.pattern.title}\n{said}\n{first.means}", hint=f"{first.do} {error.hint}"
        )
    if diagnosis.unexplained:
        said = "\n".join(f"  {seen.text}" for seen in diagnosis.unexplained)
        return ForgeError(f"{error.message}; its first error is not recognised:\n{said}", hint=error.hint)
    return error

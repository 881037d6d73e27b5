"""The failure of another program, explained by its log as `trtforge doctor --log` would."""

from trtforge.core.errors import ForgeError, LoggedError


def explained(error: LoggedError) -> ForgeError:
    """The same failure with the first real error of its log; as it is where the log cannot be read or holds none."""
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

class Logger:
    def set_level(self, min_severity):
        assert min_severity in ("internal_error", "error", "warning", "info", "verbose", "debug")

    def info(self, text):
        print(f"[11/21/2026-12:00:00] [TRT-LLM] [I] {text}", flush=True)


logger = Logger()

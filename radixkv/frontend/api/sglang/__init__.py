"""SGLang's ``/generate`` API."""

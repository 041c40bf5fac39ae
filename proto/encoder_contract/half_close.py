"""The metadata of a Submit whose caller half-closes after the last answer: `EncoderService.Submit` in encoder.proto."""

HALF_CLOSES = ("half-closes", "yes")

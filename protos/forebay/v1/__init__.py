"""Messages and stubs of forebay.v1, generated from the .proto files beside them by `make proto`."""

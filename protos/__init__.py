"""The contracts: .proto files and the code generated from them (`make protos`). Nothing else is shared between services."""

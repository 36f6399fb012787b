"""The contracts: .proto files and the code generated from them (`make protos`). The services share nothing else."""

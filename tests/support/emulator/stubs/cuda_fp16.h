// The emulator defines the types.

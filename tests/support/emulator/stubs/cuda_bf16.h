// The emulator has the types.

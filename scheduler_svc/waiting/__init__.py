"""Who waits, in which order, and who may: queues, tenants' shares and limits, refusals at the door."""

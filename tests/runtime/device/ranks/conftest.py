from support.quick_opening import opens_quickly as opens_quickly

-- Makes the streams that an engine reads, and their groups; those that are there stay as they are.
-- KEYS 1 what this engine is told, 2... input streams
-- ARGV 1 group
-- include placement
for _, key in ipairs(KEYS) do
  local made = redis.pcall('XGROUP', 'CREATE', key, ARGV[1], '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
end
redis.call('PEXPIRE', KEYS[1], WARM_TTL_MS)
return 'OK'

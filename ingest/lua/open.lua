-- Makes the streams that an engine reads, and their groups; those that are there stay as they are.
-- KEYS 1 what this engine is told, 2... input streams
-- ARGV 1 group
-- include placement
for i, key in ipairs(KEYS) do
  local made = redis.pcall('XGROUP', 'CREATE', key, ARGV[1], '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
  if i == 1 then redis.call('PEXPIRE', key, WARM_TTL_MS) end -- at once, since a later key may be no stream
end
return 'OK'

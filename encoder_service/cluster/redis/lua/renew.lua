-- Extends leases that this replica has or that are free. KEYS: lease of each address. ARGV: token, time to live (ms).
-- Returns for each address 1 if this replica has it now, 0 if another has it.
local replies = {}
for i = 1, #KEYS do
  local holder = get(KEYS[i])
  replies[i] = 0
  if holder == '' or holder == ARGV[1] then
    redis.call('SET', KEYS[i], ARGV[1], 'PX', ARGV[2])
    replies[i] = 1
  end
end
return replies
